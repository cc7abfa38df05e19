"use strict";

// -- views, keys and the start --

const go = hash => { if (location.hash === hash) route(); else location.hash = hash; };

function route() {
	const [, name, id] = location.hash.split("/"), isServer = name === "server";
	$("chat").hidden = isServer;
	$("server").hidden = !isServer;
	$("to-server").toggleAttribute("aria-current", isServer);
	openSide(false);
	dashboard.show(isServer);
	if (!isServer && id !== chat.id) {
		answering.leave();
		endEdit();
		chat = chats.get(id) ?? newChat();
		showChat();
	}
	showHead();
	if (!isServer) $("prompt").focus();
}

const openSide = isOpen => { document.body.classList.toggle("side-open", isOpen); };

$("composer").onsubmit = event => {
	event.preventDefault();
	if (answering.isBusy) answering.stopping.abort(); else send();
};
$("prompt").oninput = showBusy;
$("prompt").onkeydown = event => {
	if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
	event.preventDefault();
	send();
};
document.onkeydown = event => {
	if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
		event.preventDefault();
		go("#/");
	} else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
		openSide(false);
		if (answering.isBusy) answering.stopping.abort(); else endEdit();
	}
};
$("editing").querySelector("button").onclick = endEdit;
$("new").onclick = () => go("#/");
$("search").oninput = showList;
$("title").onchange = () => { chat.title = $("title").value.trim(); save(chat); showHead(); };
$("title").onkeydown = event => { if (event.key === "Enter") $("title").blur(); };
$("model").onchange = () => { chat.model = $("model").value; showHead(); };
$("span").onchange = () => dashboard.draw();
$("theme").value = localStorage.getItem(THEME) ?? "";
$("theme").onchange = () => { localStorage.setItem(THEME, $("theme").value); takeTheme(); };
$("open-side").onclick = event => { event.stopPropagation(); openSide(true); };
$("main").onclick = () => openSide(false);
$("open-settings").onclick = $("chosen").onclick = openSettings;
$("settings").oninput = readSettings;
for (const menu of [$("menu"), $("all-menu")]) menu.onclick = ({ target }) => { menu.hidePopover(); actions[target.dataset.act]?.(); };
$("more").onclick = ({ currentTarget }) => openMenu(chat, currentTarget);
$("file").onchange = async () => { await importFile($("file").files[0]); $("file").value = ""; };
$("attach").onclick = () => $("attachments").click();
$("attachments").onchange = async () => { await attach([...$("attachments").files]); $("attachments").value = ""; };
$("prompt").onpaste = event => {
	if (!event.clipboardData.files.length) return;
	event.preventDefault();
	attach([...event.clipboardData.files]);
};
$("chat").ondragover = event => { event.preventDefault(); $("chat").classList.add("dropping"); };
$("chat").ondragleave = () => $("chat").classList.remove("dropping");
$("chat").ondrop = event => {
	event.preventDefault();
	$("chat").classList.remove("dropping");
	attach([...event.dataTransfer.files]);
};
$("scroller").onscroll = () => {
	const { scrollTop, scrollHeight, clientHeight } = $("scroller");
	const isNear = scrollHeight - scrollTop - clientHeight < 40;
	if (isNear || scrollTop < lastTop) isAtEnd = isNear; // what grows below does not count
	lastTop = scrollTop;
};
new ResizeObserver(scrollDown).observe($("log"));
document.querySelectorAll("[data-icon]").forEach(element => element.prepend(icon(element.dataset.icon)));
document.querySelectorAll("[data-close]").forEach(button => { button.onclick = () => button.closest("dialog").close(); });
for (const idea of ["What is minisgl?", "What is the capital of France?", "What is 17 + 25?"]) {
	$("ideas").append(make("button", { class: "plain", click: () => { write(idea); send(); } }, idea));
}
window.onhashchange = route;
window.onpagehide = () => {
	answering.isPageLeft = true; // the browser then ends the connection
	if (answering.isBusy) answering.keep();
};
window.onpageshow = () => { answering.isPageLeft = false; };
for (const key of Object.keys(localStorage).filter(key => key.startsWith(PREFIX))) {
	const found = stored(key);
	if (found?.messages) chats.set(found.id, found);
}
route();
showBusy();
watchServer();

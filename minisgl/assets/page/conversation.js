"use strict";

// -- the conversation that is shown --

let chat = newChat(), edited = null; // the question that is edited
const views = new WeakMap(); // the elements of messages

function addMessage(message) {
	const view = message.role === "user" ? null : new AnswerView(message, chat);
	const element = view?.element ?? questionElement(message);
	view?.update(false);
	views.set(message, element);
	$("log").append(element);
	return view;
}

function questionElement(message) {
	const tools = [branchButtons(message), copyButton(() => message.content), iconButton("edit", "Edit", () => edit(message))];
	return make("article", { class: "question", "aria-label": "Question" },
		make("div", {}, message.content), ...fileViews(message), make("div", { class: "tools" }, ...tools.filter(Boolean)));
}

function showChat() {
	$("log").replaceChildren();
	if (chat.messages.length && chat.messages.at(-1).role !== "assistant" && !answering.isBusy) chat.messages.push({ role: "assistant", content: "", ended: "none" });
	const answers = chat.messages.filter(({ role }) => role !== "tool").map(addMessage);
	[...$("log").querySelectorAll(".question")].at(-1)?.classList.add("last");
	$("hello").hidden = chat.messages.length > 0;
	showHead();
	isAtEnd = true;
	scrollDown();
	return answers.at(-1);
}

function showHead() {
	const isServer = location.hash === "#/server";
	if (models.some(({ id }) => id === chat.model)) $("model").value = chat.model;
	$("title").value = isServer ? "Server at work" : titleOf(chat);
	$("more").hidden = !chat.messages.length;
	$("title").readOnly = isServer || !chat.messages.length;
	document.title = `${$("title").value || "New conversation"} · minisgl`;
	$("attach").title = seesImages() ? "Attach images and text files" : "Attach text files";
	const { system, sampling, thinking, schema, tools } = chat;
	const chosen = [system && "system prompt", ...Object.keys(sampling), thinking && `thinking ${thinking}`, schema && "JSON", tools && "tools"];
	$("chosen").textContent = chosen.filter(Boolean).join(" · ");
	$("chosen").hidden = !$("chosen").textContent;
	const { prompt = 0, tokens = 0 } = chat.messages.findLast(({ stats }) => stats?.prompt)?.stats ?? {};
	const room = models.find(({ id }) => id === $("model").value)?.max_model_len;
	$("meter").hidden = !room || !prompt;
	const [meter, said] = $("meter").children;
	Object.assign(meter, { max: room ?? 1, value: prompt + tokens });
	said.textContent = `${number(prompt + tokens)} of ${counted(room ?? 0, "token")}`;
	showList();
}

function showList() {
	if ($("chats").querySelector("input")) return; // one of them is being renamed
	const wanted = $("search").value.trim().toLowerCase();
	const found = [...chats.values()].filter(chat => `${titleOf(chat)}\n${chat.messages.map(({ content }) => content).join("\n")}`.toLowerCase().includes(wanted));
	$("chats").replaceChildren(...found.sort((a, b) => b.changed - a.changed).map(({ id, title, messages }) =>
		make("li", {}, make("a", { href: `#/chat/${id}`, dir: "auto", "aria-current": id === chat.id && "page" }, titleOf({ title, messages }) || "…"), menuButton(id))));
}

// The view follows the end of the answer until the reader scrolls up.
let isAtEnd = true, lastTop = 0;
function scrollDown() {
	if (isAtEnd) $("scroller").scrollTop = $("scroller").scrollHeight;
}

// -- the composer --

function showBusy() {
	const { isBusy } = answering;
	$("send").replaceChildren(icon(isBusy ? "square" : "up"));
	$("send").setAttribute("aria-label", isBusy ? "Stop" : "Send");
	$("send").disabled = !isBusy && !$("prompt").value.trim() && !attached.length;
}

function send() {
	const text = $("prompt").value, files = attached;
	if (answering.isBusy || !text.trim() && !files.length) return;
	if (wrongIn("schema") || wrongIn("tools")) return openSettings();
	write("");
	answering.ask(text, files);
}

/** Puts a text and files into the composer. */
function write(text, files = []) {
	$("prompt").value = text;
	attached = [...files];
	showAttached();
}

/** Edits a question: what followed it stays as another branch. */
function edit(question) {
	if (answering.isBusy) return;
	endEdit();
	edited = question;
	write(question.content, question.files);
	$("editing").hidden = false;
	$("editing").firstChild.textContent = question === chat.messages.findLast(({ role }) => role === "user") ? "Editing your last question" : "Editing an earlier question; what followed it is kept";
	for (let element = views.get(question); element; element = element.nextElementSibling) element.classList.add("replaced");
	$("prompt").focus();
}

function endEdit() {
	if (edited) write("");
	edited = null;
	$("editing").hidden = true;
	document.querySelectorAll(".replaced").forEach(element => element.classList.remove("replaced"));
	showBusy();
}

"use strict";

// -- what the menus do --

let chosenChat = null; // whose menu is open

/** A button that opens the menu of a conversation. */
function menuButton(id) {
	const name = `Menu of ${titleOf(chats.get(id)) || "a conversation"}`;
	return make("button", { class: "quiet", title: name, click: ({ currentTarget }) => openMenu(chats.get(id), currentTarget) }, icon("more"));
}

function openMenu(target, button) {
	chosenChat = target;
	const { bottom, right } = button.getBoundingClientRect(), menu = $("menu");
	menu.showPopover();
	const left = Math.min(Math.max(8, right - menu.offsetWidth), innerWidth - menu.offsetWidth - 8);
	const top = Math.min(bottom + 4, innerHeight - menu.offsetHeight - 8);
	Object.assign(menu.style, { left: `${left}px`, top: `${top}px`, right: "auto", bottom: "auto" });
	menu.querySelector("button").focus();
}

function download(name, content) {
	const href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
	make("a", { href, download: `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50) || "conversation"}.json` }).click();
	setTimeout(() => URL.revokeObjectURL(href), 10000);
}

function forget(ids) {
	for (const id of ids) {
		chats.delete(id);
		localStorage.removeItem(PREFIX + id);
	}
	if (ids.includes(chat.id)) go("#/"); else showList();
}

const actions = {
	/** Renames in the list, or in the head if the list is not in sight. */
	renameChat() {
		const own = chosenChat, link = $("chats").querySelector(`[href="#/chat/${own.id}"]`);
		if (!link?.checkVisibility({ visibilityProperty: true })) {
			$("title").focus();
			return $("title").select();
		}
		const field = make("input", { class: "field", "aria-label": "New name" });
		field.value = titleOf(own);
		const end = isKept => {
			field.onblur = null;
			field.remove();
			if (isKept) {
				own.title = field.value.trim();
				save(own);
			}
			showHead();
		};
		field.onblur = () => end(true);
		field.onkeydown = event => {
			event.stopPropagation();
			if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter");
		};
		link.replaceWith(field);
		field.select();
	},
	exportChat() { download(titleOf(chosenChat), asFile(chosenChat)); },
	deleteChat() { if (confirm("Delete this conversation?")) forget([chosenChat.id]); },
	importChats() { $("file").click(); },
	exportAll() {
		if (!chats.size) return say("There is no conversation to export.");
		download("conversations", JSON.stringify({ saved_by: "minisgl page", conversations: [...chats.values()] }, null, 2) + "\n");
	},
	deleteAll() {
		const ids = [...chats.keys()];
		if (ids.length && confirm(ids.length === 1 ? "Delete the only conversation?" : `Delete all ${ids.length} conversations?`)) forget(ids);
	},
};

async function importFile(file) {
	try {
		const imported = fromFile(await file.text());
		imported.forEach(save);
		if (imported.length === 1) go(`#/chat/${imported[0].id}`);
		else say(`${imported.length} conversations were imported.`);
		showList();
	} catch (error) {
		say(`${file.name} cannot be read: ${error.message}.`);
	}
}

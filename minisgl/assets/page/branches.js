"use strict";

// -- branches: what a conversation might have become --
//
// `messages` is the branch that is shown. Where there are several, the first message after the fork
// has `branches`: each a list of the messages from there on, and null in the place of this one.

/** Puts the messages from `index` on aside; returns the branches for the message that replaces them. */
function branchOff(messages, index) {
	const aside = messages.splice(index), branches = aside[0].branches ?? [null];
	delete aside[0].branches;
	branches[branches.indexOf(null)] = aside;
	branches.push(null);
	return branches;
}

/** Shows another branch from `index` on. */
function takeBranch(messages, index, wanted) {
	const { branches } = messages[index];
	const aside = messages.splice(index);
	delete aside[0].branches;
	branches[branches.indexOf(null)] = aside;
	const [first, ...others] = branches[wanted];
	branches[wanted] = null;
	messages.push(Object.assign(first, { branches }), ...others);
}

/** Buttons to go from branch to branch at a message; null if there is only one. */
function branchButtons(message) {
	const { branches } = message, count = branches?.length, at = branches?.indexOf(null);
	if (!(count > 1)) return null;
	const step = (name, title, by) => {
		const button = iconButton(name, title, () => showBranch(message, at + by));
		button.disabled = !(at + by in branches);
		return button;
	};
	return make("span", { class: "branches" }, step("back", "Previous version", -1), `${at + 1}\u2009/\u2009${count}`, step("forth", "Next version", 1));
}

function showBranch(message, wanted) {
	if (answering.isBusy) return;
	const index = chat.messages.indexOf(message);
	takeBranch(chat.messages, index, wanted);
	save(chat);
	showChat();
	isAtEnd = false;
	views.get(chat.messages[index])?.scrollIntoView({ block: "nearest" });
}

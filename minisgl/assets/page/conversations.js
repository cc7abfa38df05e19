"use strict";

// -- conversations in the browser's storage --

const PREFIX = "minisgl.chat.", DEFAULTS = "minisgl.settings";
const chats = new Map();

const stored = key => parsed(localStorage.getItem(key));
const newChat = () => ({ title: "", model: "", system: "", sampling: {}, thinking: "", schema: "", tools: "", ...stored(DEFAULTS), id: Date.now().toString(36) + Math.random().toString(36).slice(2), messages: [] });
const titleOf = ({ title, messages }) => title || (messages.find(({ role }) => role === "user")?.content.trim().split("\n")[0].slice(0, 80) ?? "");

function save(saved) {
	if (!saved.messages.length) return;
	chats.set(saved.id, saved);
	try {
		localStorage.setItem(PREFIX + saved.id, JSON.stringify(saved));
	} catch {
		say("The browser's storage is full: this conversation ends with the tab. Export it, or delete others.");
	}
}

/**
 * What a model is told of the messages: complete turns. A question whose answer failed is left out,
 * and so are calls that never got their results.
 */
function sendable(messages) {
	const said = [];
	messages.forEach((message, index) => {
		const next = messages[index + 1], isLeftOpen = message.tool_calls && next && next.role !== "tool";
		if (message.role !== "assistant" || hasCome(message) && !isLeftOpen) said.push(message);
		else if (message.content) said.push({ ...message, tool_calls: undefined });
		else while (said.length && said.pop().role !== "user");
	});
	return said;
}

/** A message without what only this page knows. */
const plainly = ({ role, content, tool_calls, tool_call_id }) => ({ role, content, tool_calls, tool_call_id });

/** In the form that /save of `minisgl chat` writes and reads. */
function asFile({ title, model, system, sampling, messages }) {
	const said = sendable(messages).map(message => ({ ...plainly(message), reasoning_content: message.reasoning_content }));
	return JSON.stringify({ saved_by: "minisgl chat", title, model, system, sampling, messages: said }, null, 2) + "\n";
}

/** Reads such a file, or a list of messages. Throws an Error for people. */
function fromFile(text) {
	const content = JSON.parse(text), messages = content?.messages ?? content;
	const fits = ({ role, content, tool_calls = [] }) => ["system", "user", "assistant", "tool"].includes(role) && typeof content === "string"
		&& tool_calls.every(call => typeof call.function.arguments === "string");
	if (!Array.isArray(messages) || !messages.length || !messages.every(fits)) throw new Error("it has no list of messages as a chat writes it");
	for (const message of messages) { // `minisgl chat` leaves thinking in the answer
		const thought = message.role === "assistant" && /^\s*<think>\n?([^]*?)\n?<\/think>\s*/.exec(message.content);
		if (thought) Object.assign(message, { reasoning_content: thought[1], content: message.content.slice(thought[0].length) });
	}
	const system = messages[0].role === "system" ? messages.shift().content : content.system;
	return { ...newChat(), title: `${content.title ?? ""}`, model: content.model, sampling: { ...content.sampling }, system: `${system ?? ""}`, schema: "", tools: "", messages, changed: Date.now() };
}

"use strict";

// -- conversations in the browser's storage --

const PREFIX = "minisgl.chat.", DEFAULTS = "minisgl.settings";
const chats = new Map();

const stored = key => parsed(localStorage.getItem(key));
const newChat = () => ({ title: "", model: "", system: "", sampling: {}, thinking: "", schema: "", tools: "", ...stored(DEFAULTS), id: Date.now().toString(36) + Math.random().toString(36).slice(2), messages: [] });

function titleOf({ title, messages }) {
	const { content = "", files } = messages.find(({ role }) => role === "user") ?? {};
	return title || content.trim().split("\n")[0].slice(0, 80) || (files?.[0].name ?? "");
}

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
const plainly = message => ({ role: message.role, content: contentOf(message), tool_calls: message.tool_calls, tool_call_id: message.tool_call_id });

/** In the form that /save of `minisgl chat` writes and reads. */
function asFile({ title, model, system, sampling, messages }) {
	const said = sendable(messages).map(message => ({ ...plainly(message), reasoning_content: message.reasoning_content }));
	return JSON.stringify({ saved_by: "minisgl chat", title, model, system, sampling, messages: said }, null, 2) + "\n";
}

const isText = value => typeof value === "string";

/** A message that a file has, with nothing but what this page knows. Throws an Error for people. */
function readMessage(message) {
	const { role, tool_calls, tool_call_id, reasoning_content, stats, ended, error, branches } = message ?? {};
	const { content, files } = role === "user" && Array.isArray(message.content) ? fromParts(message.content) : message ?? {};
	const calls = Array.isArray(tool_calls) ? tool_calls.map(({ id, function: { name, arguments: text } }) => ({ id: `${id}`, type: "function", function: { name: `${name}`, arguments: text } })) : undefined;
	if (!["system", "user", "assistant", "tool"].includes(role) || !isText(content) || !(calls ?? []).every(call => isText(call.function.arguments))) throw new Error("it has no list of messages as a chat writes it");
	const read = { role, content, tool_calls: calls, tool_call_id };
	if (isText(reasoning_content)) read.reasoning_content = reasoning_content;
	if (isText(ended)) read.ended = ended;
	if (isText(error)) read.error = error;
	if (Array.isArray(files)) read.files = files.map(({ name, text, url }) => ({ name: `${name}`, ...(isImage(url) ? { url } : { text: `${text}` }) }));
	if (stats) read.stats = Object.fromEntries(Object.entries(stats).filter(([, value]) => typeof value === "number"));
	if (Array.isArray(branches) && branches.filter(branch => branch === null).length === 1) read.branches = branches.map(branch => branch && branch.map(readMessage));
	// `minisgl chat` leaves thinking in the answer.
	const thought = role === "assistant" && /^\s*<think>\n?([^]*?)\n?<\/think>\s*/.exec(content);
	if (thought) Object.assign(read, { reasoning_content: thought[1], content: content.slice(thought[0].length) });
	return read;
}

function readChat(content) {
	const found = content?.messages ?? content;
	if (!Array.isArray(found) || !found.length) throw new Error("it has no list of messages as a chat writes it");
	const messages = found.map(readMessage);
	const system = messages[0].role === "system" ? messages.shift().content : content.system;
	const texts = Object.fromEntries(["title", "thinking", "schema", "tools"].map(name => [name, `${content[name] ?? ""}`]));
	return { ...newChat(), ...texts, model: content.model, sampling: { ...content.sampling }, system: `${system ?? ""}`, messages, changed: +content.changed || Date.now() };
}

/** The conversations of a file that one or all were exported to, or of a list of messages. Throws an Error for people. */
function fromFile(text) {
	const content = JSON.parse(text);
	return content?.conversations ? content.conversations.map(readChat) : [readChat(content)];
}

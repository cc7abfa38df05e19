"use strict";

// -- the conversation that is shown --

let chat = newChat(), isEditing = false;

function addMessage(message) {
	const isQuestion = message.role === "user";
	const view = isQuestion ? null : new AnswerView(message, chat);
	view?.update(false);
	const tools = () => make("div", { class: "tools" }, copyButton(() => message.content), iconButton("edit", "Edit", editLast));
	$("log").append(view?.element ?? make("article", { class: "question", "aria-label": "Question" }, make("div", {}, message.content), tools()));
	return view;
}

function showChat() {
	$("log").replaceChildren();
	if (chat.messages.length && chat.messages.at(-1).role !== "assistant" && !answering.isBusy) chat.messages.push({ role: "assistant", content: "", ended: "none" });
	chat.messages.filter(({ role }) => role !== "tool").forEach(addMessage);
	const questions = $("log").querySelectorAll(".question");
	questions.forEach((question, index) => { // only the last can be edited
		question.classList.toggle("last", index === questions.length - 1);
		question.querySelector("[title=Edit]").hidden = index < questions.length - 1;
	});
	$("hello").hidden = chat.messages.length > 0;
	showHead();
	isAtEnd = true;
	scrollDown();
}

function showHead() {
	const isServer = location.hash === "#/server";
	if (models.some(({ id }) => id === chat.model)) $("model").value = chat.model;
	$("title").value = isServer ? "Server at work" : titleOf(chat);
	$("title").readOnly = isServer || !chat.messages.length;
	document.title = `${$("title").value || "New conversation"} · minisgl`;
	const { system, sampling, thinking, schema, tools } = chat;
	const chosen = [system && "system prompt", ...Object.keys(sampling), thinking && `thinking ${thinking}`, schema && "JSON", tools && "tools"];
	$("chosen").textContent = chosen.filter(Boolean).join(" · ");
	$("chosen").hidden = !$("chosen").textContent;
	const { prompt = 0, tokens = 0 } = chat.messages.findLast(({ stats }) => stats?.prompt)?.stats ?? {};
	const room = models.find(({ id }) => id === $("model").value)?.max_model_len;
	$("meter").hidden = !room || !prompt;
	const [meter, said] = $("meter").children;
	Object.assign(meter, { max: room ?? 1, value: prompt + tokens });
	said.textContent = `${number(prompt + tokens)} of ${number(room ?? 0)} tokens`;
	showList();
}

function showList() {
	const wanted = $("search").value.trim().toLowerCase();
	const found = [...chats.values()].filter(chat => `${titleOf(chat)}\n${chat.messages.map(({ content }) => content).join("\n")}`.toLowerCase().includes(wanted));
	$("chats").replaceChildren(...found.sort((a, b) => b.changed - a.changed).map(({ id, title, messages }) =>
		make("li", {}, make("a", { href: `#/chat/${id}`, dir: "auto", "aria-current": id === chat.id && "page" }, titleOf({ title, messages }) || "…"))));
}

// The view follows the end of the answer until the reader scrolls up.
let isAtEnd = true, lastTop = 0;
function scrollDown() {
	if (isAtEnd) $("scroller").scrollTop = $("scroller").scrollHeight;
}

// -- asking --

const answering = {
	get isBusy() { return !!this.stopping; },

	/** Stops an answer that goes on in a conversation that is left. */
	leave() {
		this.stopping?.abort();
		this.stopping = null;
		showBusy();
	},

	ask(text) {
		const { messages } = chat;
		if (isEditing) messages.length = messages.findLastIndex(({ role }) => role === "user");
		messages.push({ role: "user", content: text });
		endEdit();
		this.run();
	},

	retry() {
		if (this.isBusy) return;
		if (chat.messages.at(-1)?.role === "assistant") chat.messages.pop();
		this.run();
	},

	giveResults(calls) {
		for (const { dataset, value } of calls.querySelectorAll("textarea")) chat.messages.push({ role: "tool", tool_call_id: dataset.call, content: value });
		this.run();
	},

	body() {
		const { sampling, thinking, schema, tools, system, messages } = chat;
		// What a model has thought is of use to it between calls and their results only.
		const said = sendable(messages).map(message => ({ ...plainly(message), ...(message.tool_calls && { reasoning_content: message.reasoning_content }) }));
		return JSON.stringify({
			model: $("model").value || undefined,
			messages: system ? [{ role: "system", content: system }, ...said] : said,
			stream: true,
			stream_options: { include_usage: true, continuous_usage_stats: true }, // also if it is cut
			...sampling,
			...(thinking && { reasoning: { enabled: thinking === "on" } }),
			...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } }),
			...(tools && { tools: JSON.parse(tools) }),
		});
	},

	async run() {
		const own = chat, message = { role: "assistant", content: "", stats: {} }, stopping = new AbortController();
		this.stopping = stopping;
		Object.assign(own, { changed: Date.now(), model: $("model").value || own.model });
		save(own);
		history.replaceState(null, "", `#/chat/${own.id}`);
		showChat();
		const view = addMessage(message), sent = performance.now();
		view.update(true);
		showBusy();
		let frame, saved = sent;
		this.keep = () => { // what has come, for a reload to find
			saved = performance.now();
			save({ ...own, messages: [...own.messages, { ...message, ended: "left" }] });
			chats.set(own.id, own);
		};
		const draw = () => {
			frame = null;
			view.update(true);
			scrollDown();
		};
		let isReached = false;
		try {
			const response = await call("v1/chat/completions", { method: "POST", body: this.body(), signal: stopping.signal });
			isReached = true;
			for await (const data of eventsOf(response.body)) {
				if (data === "[DONE]") break;
				take(message, JSON.parse(data), (performance.now() - sent) / 1000);
				frame ??= requestAnimationFrame(draw);
				if (performance.now() - saved > 2000) this.keep();
			}
			if (!message.ended) throw new TypeError("the stream ended early");
		} catch (error) {
			message.ended = stopping.signal.aborted ? "stopped" : this.isPageLeft ? "left" : isReached ? "lost" : "unreached";
			if (error instanceof APIError) message.error = error.message;
			else if (!/stopped|left/.test(message.ended)) watchServer();
		}
		cancelAnimationFrame(frame);
		if (this.stopping === stopping) this.stopping = null;
		const isTakenBack = message.ended === "stopped" && !hasCome(message);
		if (!hasCome(message)) message.ended = message.error || message.ended in NOTICES ? message.ended : "empty";
		if (!isTakenBack) own.messages.push(message);
		if (chats.has(own.id)) save(own); // unless it was deleted
		showBusy();
		if (own !== chat) return showList();
		if (isTakenBack) {
			view.element.remove();
			editLast();
		} else view.update(false);
		showHead();
		scrollDown();
	},
};

/** Adds a chunk of the stream to the message; `time`: seconds since the question. */
function take(message, chunk, time) {
	if (chunk.error) throw new APIError(chunk.error.message);
	const { stats } = message, { usage } = chunk, [{ delta = {}, finish_reason = null } = {}] = chunk.choices;
	if (usage) {
		Object.assign(stats, {
			prompt: usage.prompt_tokens,
			tokens: usage.completion_tokens,
			cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
			reasoning: usage.completion_tokens_details?.reasoning_tokens,
		});
	}
	const { content, tool_calls = [], reasoning_content: thought = delta.reasoning } = delta;
	if (content || thought || tool_calls.length) {
		stats.first ??= time;
		stats.time = time - stats.first;
	}
	if (thought) message.reasoning_content = (message.reasoning_content ?? "") + thought;
	else if (message.reasoning_content) stats.thought ??= stats.time;
	if (content) message.content += content;
	for (const { index, id, function: { name, arguments: text = "" } = {} } of tool_calls) {
		message.tool_calls ??= [];
		message.tool_calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
		message.tool_calls[index].function.arguments += text;
	}
	if (finish_reason) message.ended = finish_reason;
}

function showBusy() {
	const { isBusy } = answering;
	$("send").replaceChildren(icon(isBusy ? "square" : "up"));
	$("send").setAttribute("aria-label", isBusy ? "Stop" : "Send");
	$("send").disabled = !isBusy && !$("prompt").value.trim();
}

function send() {
	const text = $("prompt").value;
	if (answering.isBusy || !text.trim()) return;
	if (wrongIn("schema") || wrongIn("tools")) return openSettings();
	$("prompt").value = "";
	answering.ask(text);
}

function editLast() {
	const question = $("log").querySelector(".question.last");
	if (!question || answering.isBusy) return;
	isEditing = true;
	$("prompt").value = chat.messages.findLast(({ role }) => role === "user").content;
	$("editing").hidden = false;
	for (let element = question; element; element = element.nextElementSibling) element.classList.add("replaced");
	showBusy();
	$("prompt").focus();
}

function endEdit() {
	if (isEditing) $("prompt").value = "";
	isEditing = false;
	$("editing").hidden = true;
	document.querySelectorAll(".replaced").forEach(element => element.classList.remove("replaced"));
	showBusy();
}

// -- what the menu does --

const actions = {
	exportChat() {
		const href = URL.createObjectURL(new Blob([asFile(chat)], { type: "application/json" }));
		const name = titleOf(chat).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50) || "conversation";
		make("a", { href, download: `${name}.json` }).click();
		setTimeout(() => URL.revokeObjectURL(href), 10000);
	},
	importChat() { $("file").click(); },
	deleteChat() {
		if (!confirm("Delete this conversation?")) return;
		chats.delete(chat.id);
		localStorage.removeItem(PREFIX + chat.id);
		go("#/");
	},
};

async function importFile(file) {
	try {
		const imported = fromFile(await file.text());
		save(imported);
		go(`#/chat/${imported.id}`);
	} catch (error) {
		say(`${file.name} cannot be read: ${error.message}.`);
	}
}

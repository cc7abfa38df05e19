"use strict";

// -- asking --

const answering = {
	get isBusy() { return !!this.stopping; },

	/** Stops an answer that goes on in a conversation that is left. */
	leave() {
		this.stopping?.abort();
		this.stopping = null;
		showBusy();
	},

	ask(text, files = []) {
		const { messages } = chat, index = messages.indexOf(edited);
		const branches = index < 0 ? undefined : this.replace(index);
		messages.push({ role: "user", content: text, ...(files.length && { files }), branches });
		endEdit();
		this.run();
	},

	/** Answers the last question again. The answer that there is stays as another branch. */
	retry() {
		if (this.isBusy) return;
		const branches = chat.messages.at(-1)?.role === "assistant" ? this.replace(chat.messages.length - 1) : undefined;
		this.run({ role: "assistant", content: "", stats: {}, branches });
	},

	/** Takes the messages from `index` on away, and keeps them as a branch if there is an answer in it. */
	replace(index) {
		const { messages } = chat;
		const isKept = messages.slice(index).some(message => message.role === "assistant" && hasCome(message));
		return isKept ? branchOff(messages, index) : messages.splice(index)[0].branches;
	},

	/** Goes on with an answer that was cut. */
	resume() {
		if (!this.isBusy) this.run(chat.messages.at(-1));
	},

	giveResults(calls) {
		for (const { dataset, value } of calls.querySelectorAll("textarea")) chat.messages.push({ role: "tool", tool_call_id: dataset.call, content: value });
		this.run();
	},

	/** The request; `resumed`: the answer that goes on, if one does. */
	body(resumed) {
		const { sampling, thinking, schema, tools, system, messages } = chat;
		// What a model has thought is of use to it between calls and their results, and where it goes on.
		const said = sendable(messages).map(message => ({ ...plainly(message), ...((message.tool_calls || message === resumed) && { reasoning_content: message.reasoning_content }) }));
		return JSON.stringify({
			model: $("model").value || undefined,
			messages: system ? [{ role: "system", content: system }, ...said] : said,
			stream: true,
			stream_options: { include_usage: true, continuous_usage_stats: true }, // also if it is cut
			...sampling,
			...(thinking && { reasoning: { enabled: thinking === "on" } }),
			...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } }),
			...(tools && { tools: JSON.parse(tools) }),
			...(resumed && { continue_final_message: true }),
		});
	},

	/** Asks for an answer, and shows it as it comes; `message`: one that goes on, or a new one. */
	async run(message = { role: "assistant", content: "", stats: {} }) {
		const own = chat, stopping = new AbortController(), isResumed = own.messages.includes(message);
		const before = isResumed ? { ...message.stats } : null;
		this.stopping = stopping;
		if (isResumed) Object.assign(message, { error: undefined, ended: undefined, stats: message.stats ?? {} });
		Object.assign(own, { changed: Date.now(), model: $("model").value || own.model });
		history.replaceState(null, "", `#/chat/${own.id}`);
		const shown = showChat(), view = isResumed ? shown : addMessage(message), sent = performance.now();
		view.update(true);
		showBusy();
		let frame, saved = sent;
		this.keep = () => { // what has come, for a reload to find
			saved = performance.now();
			save({ ...own, messages: [...own.messages.filter(other => other !== message), { ...message, ended: "left" }] });
			chats.set(own.id, own);
		};
		this.keep();
		showList();
		const draw = () => {
			frame = null;
			view.update(true);
			scrollDown();
		};
		let isReached = false;
		try {
			const response = await call("v1/chat/completions", { method: "POST", body: this.body(isResumed ? message : null), signal: stopping.signal });
			isReached = true;
			for await (const data of eventsOf(response.body)) {
				if (data === "[DONE]") break;
				take(message, JSON.parse(data), (performance.now() - sent) / 1000, before);
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
		const isTakenBack = message.ended === "stopped" && !hasCome(message) && !message.branches;
		if (!hasCome(message)) message.ended = message.error || message.ended in NOTICES ? message.ended : "empty";
		if (!isTakenBack && !isResumed) own.messages.push(message);
		if (chats.has(own.id)) save(own); // unless it was deleted
		showBusy();
		if (own !== chat) return showList();
		if (isTakenBack) {
			view.element.remove();
			edit(own.messages.findLast(({ role }) => role === "user"));
		} else view.update(false);
		showHead();
		scrollDown();
	},
};

/**
 * Adds a chunk of the stream to the message. `time`: seconds since the question. `before`: the
 * figures of an answer that goes on, up to there.
 */
function take(message, chunk, time, before) {
	if (chunk.error) throw new APIError(chunk.error.message);
	const { stats } = message, { usage } = chunk, [{ delta = {}, finish_reason = null } = {}] = chunk.choices;
	if (usage) {
		const { accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 } = usage.completion_tokens_details ?? {};
		Object.assign(stats, {
			prompt: usage.prompt_tokens,
			tokens: usage.completion_tokens,
			cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
			reasoning: usage.completion_tokens_details?.reasoning_tokens,
			accepted,
			drafted: accepted + rejected,
		});
		if (before?.prompt) {
			const sums = ["tokens", "accepted", "drafted"].map(name => [name, (before[name] ?? 0) + stats[name]]);
			Object.assign(stats, before, Object.fromEntries(sums));
		}
	}
	const { content, tool_calls = [], reasoning_content: thought = delta.reasoning } = delta;
	if (content || thought || tool_calls.length) {
		stats.first ??= time;
		stats.time = before?.time == null ? time - stats.first : before.time + time;
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

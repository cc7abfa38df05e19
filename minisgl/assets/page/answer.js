"use strict";

// -- an answer --

const NOTICES = {
	length: "The answer was cut: it reached the limit of tokens.",
	stopped: "You stopped this answer.",
	lost: "The connection was lost before the answer was complete.",
	left: "The page was left before the answer was complete.",
	unreached: "The server does not answer.",
	empty: "The answer is empty.",
	none: "This question has no answer.",
};

/** Whether anything of an answer has come. */
const hasCome = ({ content, reasoning_content, tool_calls }) => !!(content || reasoning_content || tool_calls);

/** Whether a message has calls that can get results: those of an answer that was cut cannot. */
const isCalling = ({ tool_calls, ended = "tool_calls" }) => !!tool_calls && ended === "tool_calls";

/** Whether an answer was cut in its text. A schema holds for whole answers only. */
const canGoOn = ({ content, tool_calls, ended }) => !!content && !tool_calls && ["length", "stopped", "lost", "left", "unreached"].includes(ended) && !chat.schema;

class AnswerView {
	constructor(message, chat) {
		Object.assign(this, { message, chat });
		this.summary = make("summary");
		this.thinking = new MarkdownView();
		this.details = make("details", { class: "thinking", hidden: true }, this.summary, this.thinking.element);
		this.body = make("div", { class: "body" });
		this.calls = make("div");
		this.foot = make("div", { class: "tools" });
		this.element = make("article", { class: "answer", "aria-label": "Answer" }, this.details, this.body, this.calls, this.foot);
	}

	/** Shows what has come so far; `isLive`: more follows. */
	update(isLive) {
		const { content, reasoning_content: thought, tool_calls: calls = [], stats = {}, ended, error } = this.message;
		const isLast = this.chat.messages.at(-1) === this.message;
		this.element.classList.toggle("live", isLive);
		this.element.setAttribute("aria-busy", isLive);
		this.details.hidden = !thought;
		if (thought) {
			const isOver = !isLive || !!content || calls.length > 0;
			this.thinking.set(thought, isOver);
			this.summary.textContent = isOver ? `Thought${stats.thought ? ` for ${seconds(stats.thought)}` : ""}${stats.reasoning ? ` · ${counted(stats.reasoning, "token")}` : ""}` : "Thinking…";
		}
		this.#showText(content, isLive);
		this.calls.replaceChildren(...calls.map(call => this.#call(call, isLive)));
		if (isLive) {
			this.foot.replaceChildren();
			return;
		}
		const canCall = isLast && isCalling(this.message), notice = error ?? NOTICES[ended] ?? (hasCome(this.message) ? "" : NOTICES.empty);
		if (canCall) this.calls.append(make("p", {}, make("button", { class: "solid", click: () => answering.giveResults(this.calls) }, "Send the results")));
		if (notice) this.calls.append(make("p", { class: "notice" }, notice));
		const facts = [
			stats.tokens && counted(stats.tokens, "token"),
			stats.first && `first after ${seconds(stats.first)}`,
			stats.tokens > 1 && stats.time > 0.05 && `${number((stats.tokens - 1) / stats.time)} tokens/s`,
			stats.drafted && `${number(stats.accepted)} of ${counted(stats.drafted, "draft")} accepted`,
			stats.prompt && `${percent(stats.cached / stats.prompt)} of the prompt cached`,
		];
		this.foot.replaceChildren(...[branchButtons(this.message), make("span", {}, facts.filter(Boolean).join(" · "))].filter(Boolean));
		if (content) this.foot.append(copyButton(() => content));
		if (isLast && hasCome(this.message)) this.foot.append(iconButton("retry", "Answer again", () => answering.retry()));
		if (isLast && canGoOn(this.message)) this.calls.lastChild.append(make("button", { class: "plain", click: () => answering.resume() }, "Continue"));
		else if (isLast && !hasCome(this.message)) this.calls.lastChild.append(make("button", { class: "plain", click: () => answering.retry() }, "Try again"));
	}

	#showText(content, isLive) {
		const asJSON = /^\s*[{[]/.test(content) && !!(isLive ? this.chat.schema : parsed(content));
		const goesOn = isLive && this.isWhole; // an answer that was cut
		this.isWhole = !isLive;
		if (asJSON !== this.asJSON || (asJSON && !isLive) || goesOn) {
			this.asJSON = asJSON;
			this.view = asJSON ? new CodeView("json", "JSON") : new MarkdownView();
			this.body.replaceChildren(this.view.element);
		}
		this.view.set(asJSON && !isLive ? indented(content) : content, !isLive);
	}

	#call({ id, function: { name, arguments: text } }, isLive) {
		const shown = !isLive && parsed(text) ? indented(text) : text;
		const card = make("section", { class: "call", "aria-label": `Call of ${name}` }, make("header", {}, icon("call"), name), make("pre", { tabindex: 0 }, shown));
		const result = this.chat.messages.find(({ tool_call_id }) => tool_call_id === id);
		if (result) card.append(make("pre", { tabindex: 0, "aria-label": "Result" }, result.content));
		else if (!isLive && isCalling(this.message) && this.chat.messages.at(-1) === this.message) card.append(make("label", {}, "Its result", make("textarea", { class: "field mono", rows: 2, "data-call": id })));
		return card;
	}
}

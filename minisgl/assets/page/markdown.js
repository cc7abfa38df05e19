"use strict";

// -- Markdown --

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;
const PIECES = new RegExp(`[^]{1,${LONG}}`, "gu"); // of a longer line
const DEEP = 8; // levels of quotes, lists and styles

const startsBlock = line => [FENCE, HEADING, RULE, QUOTE, ITEM, FORMULA_LINE].some(form => form.test(line));
const indentOf = line => line.search(/[^ ]|$/);
const cells = line => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
const IN_CELL = /\$\$.{1,500}?\$\$|\\\(.{1,500}?\\\)|\\\[.{1,500}?\\\]|(?<![\p{L}\p{N}])\$(?!\s).{1,500}?(?<![\s\\])\$(?!\d)/gu; // a formula

/** The cells of a row. Where it has more than `columns`, strokes within formulas part none. */
function cellsOf(line, columns) {
	const found = cells(line);
	if (found.length <= columns) return found;
	return cells(line.replace(IN_CELL, formula => formula.replaceAll("|", "\0"))).map(cell => cell.replaceAll("\0", "|"));
}

function isHead(line, delimiters) {
	const columns = DELIMITERS.test(delimiters) ? cells(delimiters).length : 0;
	return cellsOf(line, columns).length === columns;
}

/** The blocks of a text: the number of its first line, of the line after it, and how to make it. */
function* blocks(lines, depth = 0) {
	for (let at = 0; at < lines.length;) {
		const first = at, line = lines[at];
		let found, size = line.length;
		const take = holds => {
			for (at++; at < lines.length && size < LONG && holds(lines[at], lines[at - 1]); at++) size += lines[at].length;
			return lines.slice(first, at);
		};
		const block = (build, more) => ({ first, at, build, isFull: size >= LONG, ...more });
		if (!line.trim()) at++;
		else if ((found = FENCE.exec(line))) {
			const [, fence, language] = found;
			const ends = text => text.trim().startsWith(fence) && !text.trim().replaceAll(fence[0], "");
			for (at++; at < lines.length && !ends(lines[at]); at++);
			const code = lines.slice(first + 1, at).map(line => line + "\n").join(""), isOpen = at === lines.length;
			if (!isOpen) at++;
			yield block(() => fenced(language, code, isOpen), { language, ends, isOpen });
		} else if ((found = FORMULA_LINE.exec(line))) { // up to its end, or to an empty line
			const close = formulaEnd(found[1]);
			let isOver = line.slice(found[0].length).includes(close);
			const text = take(next => {
				if (isOver || !next.trim()) return false;
				isOver = next.includes(close);
				return true;
			});
			yield block(open => withText(make("p"), text.join("\n").trim(), open));
		} else if ((found = HEADING.exec(line))) {
			at++;
			const [, { length }, text] = found; // the page's own headings are above
			yield block(open => withText(make(`h${Math.min(6, length + 2)}`), text, open));
		} else if (RULE.test(line)) {
			at++;
			yield block(() => make("hr"));
		} else if (QUOTE.test(line) && depth < DEEP) {
			const inner = take(next => QUOTE.test(next)).map(text => text.replace(QUOTE, ""));
			yield block(open => withBlocks(make("blockquote"), inner, open, depth + 1));
		} else if ((found = ITEM.exec(line)) && depth < DEEP) {
			const [, { length: indent }, mark] = found, isOrdered = /\d/.test(mark);
			const items = take((next, before) => {
				if (!next.trim() || indentOf(next) >= indent + 2) return true;
				const item = ITEM.exec(next);
				return item ? /\d/.test(item[2]) === isOrdered && !RULE.test(next) : before.trim() && !startsBlock(next);
			});
			for (; !items.at(-1).trim(); at--) items.pop();
			yield block(open => listOf(items, indent, isOrdered, open, depth));
		} else if (line.includes("|") && isHead(line, lines[at + 1] ?? "")) {
			const rows = take(next => next.includes("|"));
			yield block(() => tableOf(rows));
		} else {
			// In a text, a number with a full stop begins a list only if it is 1.
			const text = take(next => next.trim() && (!startsBlock(next) || /^ *(?!1[.)])\d+[.)]/.test(next)));
			yield block(open => withText(make("p"), text.join("\n").trim(), open));
		}
	}
}

/** A block between fences: code, or a formula. */
function fenced(language, code, isOpen) {
	const formula = language === "math" && !isOpen && formulaOf(code, true);
	if (formula) return formula;
	const view = new CodeView(language);
	view.set(code);
	return view.element;
}

function withBlocks(parent, lines, open, depth) {
	const found = [...blocks(lines, depth)];
	parent.append(...found.map((block, index) => block.build(open && index === found.length - 1)));
	return parent;
}

function listOf(lines, indent, isOrdered, open, depth) {
	const items = [];
	for (const line of lines) {
		const item = ITEM.exec(line);
		if (item && item[1].length < indent + 2) items.push({ offset: item[0].length, lines: [line.slice(item[0].length).replace(/^\[([ x])\] /i, (_, mark) => mark === " " ? "☐ " : "☑ ")] });
		else items.at(-1).lines.push(line.slice(Math.min(indentOf(line), items.at(-1).offset)));
	}
	return make(isOrdered ? "ol" : "ul", { start: isOrdered && parseInt(lines[0]) }, ...items.map(({ lines }, index) => {
		const item = withBlocks(make("li"), lines, open && index === items.length - 1, depth + 1);
		if (item.firstChild?.tagName === "P") item.firstChild.replaceWith(...item.firstChild.childNodes);
		return item;
	}));
}

function tableOf([head, delimiters, ...rows]) {
	const sides = cells(delimiters).map(cell => cell.endsWith(":") && (cell.startsWith(":") ? "center" : "end"));
	const row = (line, tag) => {
		const texts = cellsOf(line, sides.length);
		return make("tr", {}, ...sides.map((side, index) => withText(make(tag, { class: side }), texts[index] ?? "")));
	};
	const table = make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map(line => row(line, "td"))));
	return make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, table);
}

const SPECIAL = /\${1,2}|\\begin\{[a-zA-Z]+\*?\}|\\[!-/:-@[-`{-~]|`+|\*{1,3}|_{1,3}|~~|!?\[|https?:\/\/|\n/g;
const LINK = /\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\( *<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?: +"[^"]*")? *\)/y;
const ADDRESS = /https?:\/\/[^\s<>"]*[^\s<>".,:;!?)\]'*_~]/y;
const SAFE = /^(https?:\/\/|mailto:)/i;
const WORD = /[\p{L}\p{N}]/u;
const STYLES = { "*": "em", _: "em", "**": "strong", __: "strong", "***": "strong", ___: "strong", "~~": "del" };

/** Appends a text with its inline styles. `open`: more may follow, so a style may still end. */
function withText(parent, text, open = false, depth = 0) {
	const never = {}; // delimiters that do not come again, so that hostile text takes linear time
	const endOf = (run, from) => {
		for (let end = from; !never[run] && (end = text.indexOf(run, end)) >= 0; end++) {
			if (run[0] === "`" ? text[end - 1] !== "`" && text[end + run.length] !== "`"
				: end > from && /[^\s\\]/.test(text[end - 1]) && !(run[0] === "_" && WORD.test(text[end + run.length]))) return end;
		}
		never[run] = true;
		return open && run.length > 1 ? text.length : -1;
	};
	const link = (href, ...inner) => make("a", { href, target: "_blank", rel: "noreferrer" }, ...inner);
	let plain = "", at = 0;
	for (;;) {
		SPECIAL.lastIndex = at;
		const found = SPECIAL.exec(text);
		plain += text.slice(at, found?.index);
		if (!found) break;
		const [run] = found, start = found.index, opening = run[0];
		let node, end;
		at = start + run.length;
		const formula = formulaEnd(run) && depth < DEEP ? formulaAt(text, start, run) : null;
		if (formula) ({ node, end: at } = formula);
		else if (opening === "\\") plain += formulaEnd(run) ? run : run[1];
		else if (opening === "\n") node = make("br");
		else if (opening === "`") {
			end = endOf(run, at);
			if (end >= 0) node = make("code", { dir: "ltr" }, text.slice(at, end).replace(/^ (.*) $/, "$1"));
		} else if (run in STYLES) {
			if (/\S/.test(text[at] ?? "") && !(opening === "_" && WORD.test(text[start - 1])) && depth < DEEP) end = endOf(run, at);
			if (end >= 0) node = withText(make(STYLES[run]), text.slice(at, end), open && end === text.length, depth + 1);
			if (node && run.length === 3) node = make("em", {}, node);
		} else if (depth < DEEP) { // an image becomes a link as well: nothing is loaded from outside
			const form = run.endsWith("[") ? LINK : ADDRESS;
			form.lastIndex = start + (run === "![");
			const [whole, name, href] = form.exec(text) ?? [];
			if (whole && form === ADDRESS) node = link(whole, whole);
			else if (whole && SAFE.test(href)) node = withText(link(href), name || href, false, DEEP);
			if (node) at = form.lastIndex;
		}
		if (end >= 0) at = end + run.length;
		if (node) {
			parent.append(plain, node);
			plain = "";
		} else if (opening !== "\\") plain += run;
	}
	parent.append(plain);
	return parent;
}

/** Markdown that grows: finished blocks are rendered once, and only the last one again. */
class MarkdownView {
	constructor() {
		this.element = make("div", { class: "text" });
		this.start = 0; // of what may still change
		this.tail = []; // its elements
	}

	set(text, done) {
		if (this.code) this.#continueCode(text, done);
		while (!this.code && this.start < text.length && this.#settle(text, done));
	}

	/** Renders what follows `start`; returns whether there is more. */
	#settle(text, done) {
		const rest = text.slice(this.start, this.start + 4 * LONG), isAll = this.start + rest.length === text.length;
		const lines = rest.split("\n").flatMap(line => line.length > LONG ? line.match(PIECES) : [line]);
		const offsets = [0]; // of the lines
		for (const line of lines) {
			const end = offsets.at(-1) + line.length;
			offsets.push(end + (rest[end] === "\n"));
		}
		this.tail.forEach(element => element.remove());
		this.tail = [];
		const found = [...blocks(lines)], last = found.at(-1);
		if (!last) {
			if (!isAll) this.start += rest.length;
			return !isAll;
		}
		const begun = offsets[last.first + 1];
		if (last.isOpen && rest[begun - 1] === "\n") {
			this.#append(found.slice(0, -1));
			this.code = new CodeView(last.language);
			this.fence = last;
			this.codeStart = this.start += begun;
			this.element.append(this.code.element);
			this.#continueCode(text, done);
			return true;
		}
		// The last block may go on. So may the one before, while the line that ends it is incomplete.
		let settled = found.length - (begun < rest.length || found.at(-2)?.isFull ? 1 : 2);
		if (!isAll) settled = Math.max(1, found.length - 1);
		else if (done) settled = found.length;
		if (settled > 0) {
			this.#append(found.slice(0, settled));
			this.start += offsets[found[settled - 1].at];
		}
		if (isAll) this.tail = this.#append(found.slice(Math.max(0, settled)), true);
		return !isAll;
	}

	#append(found, open = false) {
		const elements = found.map(({ build, isFull }, index) => {
			const element = build(open && index === found.length - 1);
			element.classList.toggle("long", isFull);
			return element;
		});
		this.element.append(...elements);
		return elements;
	}

	/** Grows the open block of code. Only a complete line can end it, and each is looked at once. */
	#continueCode(text, done) {
		for (let newline; (newline = text.indexOf("\n", this.start)) >= 0 || done;) {
			const end = newline < 0 ? text.length : newline;
			if (end - this.start < 200 && this.fence.ends(text.slice(this.start, end))) {
				const code = text.slice(this.codeStart, this.start);
				if (this.fence.language === "math") this.code.element.replaceWith(fenced("math", code));
				else this.code.set(code);
				this.code = null;
				this.start = end + 1;
				return;
			}
			if (newline < 0) break;
			this.start = end + 1;
		}
		this.code.set(text.slice(this.codeStart));
	}
}

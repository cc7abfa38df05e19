"use strict";

// -- code --

const LONG = 8000; // characters: longer pieces are cut, so that no frame takes long
const KEYWORDS = new Set("and as async await bool break case catch class const continue def default del do elif else end enum except export extends false False finally fn for from func function if impl import in int interface is lambda let match new nil None not null or private pub public raise return self static str struct super switch this throw true True try type use var void while with yield".split(" "));
const CLOSING = { '"""': '"""', "'''": "'''", "/*": "*/", "<!--": "-->", "`": "`" };

/** The tokens of a language that have a colour: comment, opening of lines, string, number, word. */
function tokensOf(language) {
	if (/^(|te?xt|plain\w*|output|markdown|md|log)$/.test(language)) return null;
	const isHash = /^(py\w*|\w*sh|shell|ya?ml|toml|rb|ruby|perl|r|make\w*|docker\w*)$/.test(language);
	const comment = isHash ? "#.*" : /^(sql|lua|haskell)$/.test(language) ? "--.*" : language === "json" ? "(?!)" : "//.*";
	const opening = isHash ? `"""|'''` : "/\\*|<!--|`";
	return new RegExp(`(?<c>${comment})|(?<o>${opening})|(?<s>"(?:[^"\\\\]|\\\\.)*"?|'(?:[^'\\\\]|\\\\.)*'?)|(?<n>\\b\\d[\\w.]*)|(?<w>[A-Za-z_]\\w*)`, "g");
}

/** Appends a line in colours; `open` is the delimiter left open before, and the result the one after. */
function appendLine(parent, line, tokens, open) {
	let at = 0;
	const put = (end, kind) => {
		if (end > at) parent.append(kind ? make("span", { class: kind }, line.slice(at, end)) : line.slice(at, end));
		at = end;
	};
	for (let from = 0; tokens && at < line.length;) {
		if (open) {
			const end = line.indexOf(CLOSING[open], from);
			put(end < 0 ? line.length : end + CLOSING[open].length, /[/<]/.test(open) ? "c" : "s");
			if (end >= 0) open = "";
			continue;
		}
		tokens.lastIndex = at;
		const found = tokens.exec(line);
		if (!found) break;
		const { c, o, s, n, w } = found.groups;
		put(found.index);
		from = tokens.lastIndex;
		if (o) open = o;
		else put(from, c ? "c" : s ? "s" : n ? "n" : KEYWORDS.has(w) && "k");
	}
	put(line.length);
	return open;
}

/** A block of code that grows: complete lines are coloured once, and long ones are cut. */
class CodeView {
	constructor(language, label = language || "code") {
		this.text = this.open = "";
		this.taken = this.size = 0;
		this.tokens = tokensOf(language.toLowerCase());
		this.last = make("span"); // of an incomplete line
		this.element = make("div", { class: "code" },
			make("div", {}, label, copyButton(() => this.text)),
			make("pre", { tabindex: 0, dir: "ltr" }, this.last));
	}

	set(text) {
		this.text = text;
		for (let newline; (newline = text.indexOf("\n", this.taken)) >= 0 || text.length - this.taken > LONG;) {
			const end = Math.min(newline < 0 ? Infinity : newline + 1, this.taken + LONG);
			if (!this.run || this.size > LONG / 2 || end - this.taken === LONG) {
				this.last.before(this.run = make("span", { class: "long" }));
				this.size = 0;
			}
			this.open = appendLine(this.run, text.slice(this.taken, end), this.tokens, this.open);
			this.size += end - this.taken;
			this.taken = end;
		}
		this.last.replaceChildren();
		appendLine(this.last, text.slice(this.taken), this.tokens, this.open);
	}
}

/** JSON with line breaks, each value letter for letter as it was written. */
function indented(json) {
	let depth = 0;
	const line = () => "\n" + "  ".repeat(depth);
	return json.replace(/("(?:[^"\\]|\\.)*")|([{[])\s*([}\]])|\s*([{}[\],:])\s*|\s+/g, (_, text, open, close, mark) => {
		if (text || open) return text ?? open + close;
		if (/[}\]]/.test(mark)) { depth--; return line() + mark; }
		if (/[{[]/.test(mark)) { depth++; return mark + line(); }
		return mark === "," ? mark + line() : mark === ":" ? ": " : "";
	});
}

const parsed = text => { try { return JSON.parse(text); } catch { } };

"use strict";

// -- formulas: LaTeX to MathML by Temml, which browsers draw --
//
// What is not known there, or refused here, is no formula: it stays on the page as it was written.

const MAX_FORMULA = 4000, MAX_NESTED = 100; // characters, levels of elements
const MAX_LENGTH = 100; // of a space or a line, in any unit: more would push the rest out of sight

/** `\begin` of an environment, as tokens from the last to the first. */
function environment(gullet) {
	const group = letters => [{ text: "}" }, ...letters, { text: "{" }];
	const spelled = letters => letters.map(({ text }) => text).reverse().join("");
	const [letters] = gullet.consumeArgs(1), name = spelled(letters);
	if (!/^[a-zA-Z]+\*?$/.test(name)) throw new Error(`refused: ${name}`);
	const tokens = [...group(letters), { text: "\\begin", noexpand: true }];
	if (/^align\w*at/.test(name)) { // Its argument says how much memory it takes.
		const [columns] = gullet.consumeArgs(1);
		if (!/^\d$/.test(spelled(columns))) throw new Error(`refused: ${name} of many columns`);
		tokens.unshift(...group(columns));
	}
	return { tokens, numArgs: 0 };
}

// What would change the meaning of others, take time exponential in its nesting, or set the attribute `style`.
const REFUSED = /(?<!\\)(\\\\)*\\([egx]?def|let|futurelet|global|long|(re)?newcommand|providecommand|definecolor|expandafter|noexpand|equilibrium\w+|(math)?llap|sideset)(?![a-zA-Z@])/;
const MACROS = {
	"\\begin": environment,
	// Written here because Temml's own would be refused.
	"\\cancelto": "\\cancel{#2}^{#1}",
	"\\pmb": "\\boldsymbol",
	"\\prescript": "{}^{#1}_{#2}{#3}",
	// Unknown to Temml.
	"\\mbox": "\\text",
	"\\mathds": "\\mathbb",
	"\\mathbbm": "\\mathbb",
	// Nothing refers to a formula; identifiers and links are the page's own.
	"\\label": "\\@firstoftwo{}",
	"\\ref": "\\text{#1}",
	"\\eqref": "\\text{(#1)}",
};

const isNestedIn = (levels, node) => levels > 0 && [...node.children].every(child => isNestedIn(levels - 1, child));

/** Whether it has a line break outside of tables, which browsers do not draw. */
const breaksLine = (element, source) => /\\(\\|newline|cr)/.test(source) && !!element.querySelector("mo:empty:not([fence])");

const isBounded = element => [...element.querySelectorAll("*")].every(each =>
	["width", "height", "depth", "voffset", "lspace", "linethickness"].every(name => !(Math.abs(parseFloat(each.getAttribute(name))) > MAX_LENGTH)));

const withLight = (color, light) => `oklch(from ${color} ${light} c h)`;

/** A formula as an element with MathML; null if it cannot be one. */
function formulaOf(source, isDisplay) {
	if (!source.trim() || source.length > MAX_FORMULA || REFUSED.test(source)) return null;
	const element = make("span", isDisplay ? { class: "formula display", tabindex: 0, role: "group", "aria-label": "Formula" } : { class: "formula" });
	try {
		temml.render(source, element, { displayMode: isDisplay, throwOnError: true, wrap: "tex", macros: { ...MACROS } });
	} catch { // Temml's ParseError, or what hostile text makes of it
		return null;
	}
	if (!isNestedIn(MAX_NESTED, element) || !isBounded(element) || element.querySelector("[id], [href], [src]")) return null;
	if (breaksLine(element, source)) {
		const isTable = source.startsWith("\\begin{gathered}"), canBe = isDisplay && !isTable && element.textContent.trim();
		return canBe ? formulaOf(`\\begin{gathered}${source}\\end{gathered}`, true) : null;
	}
	// Colours that can be read on light paper, and on dark.
	for (const { style } of element.querySelectorAll("[style]")) {
		if (style.color) style.color = `light-dark(${withLight(style.color, "min(l, .6)")}, ${withLight(style.color, "max(l, .7)")})`;
	}
	for (const box of element.querySelectorAll("[mathbackground]")) {
		const color = box.getAttribute("mathbackground");
		box.style.background = `light-dark(${withLight(color, "max(l, .9)")}, ${withLight(color, "min(l, .35)")})`;
	}
	return element;
}

const FORMULA_ENDS = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };
const FORMULA_LINE = /^ {0,3}(\$\$|\\\[|\\begin\{[a-zA-Z]+\*?\})/; // begins a block

/** What ends the formula that `run` begins; undefined if it begins none. */
const formulaEnd = run => run.startsWith("\\begin{") ? run.replace("begin", "end") : FORMULA_ENDS[run];

/** The formula that begins in `text` at `start` with `run`: its node, and where it ends; or null. */
function formulaAt(text, start, run) {
	const from = start + run.length, close = formulaEnd(run);
	if (run === "$" && (/[\p{L}\p{N}]/u.test(text[start - 1] ?? "") || !/\S/.test(text[from] ?? ""))) return null;
	for (let end = text.indexOf(close, from); end >= 0 && end - from <= MAX_FORMULA; end = text.indexOf(close, end + 1)) {
		// A dollar ends a formula neither behind a blank, nor in front of a digit: there it is money.
		if (text[end - 1] === "\\" && close[0] === "$") continue;
		if (run === "$" && (/\s/.test(text[end - 1]) || /\d/.test(text[end + 1] ?? ""))) continue;
		const source = run in FORMULA_ENDS ? text.slice(from, end) : text.slice(start, end + close.length);
		const isMoney = run === "$" && /^\d[\d.,]*\s+(?!\\)\p{L}{2}/u.test(source);
		const node = isMoney ? null : formulaOf(source, close !== "$" && run !== "\\(");
		end += close.length;
		if (node) return { node, end };
		// Where a command is not known, nothing of it is read as Markdown either.
		return run !== "$" || !isMoney && source.includes("\\") ? { node: text.slice(start, end), end } : null;
	}
	// Only one dollar needs another: other formulas may have been cut.
	return run === "$" ? null : { node: text.slice(start), end: text.length };
}

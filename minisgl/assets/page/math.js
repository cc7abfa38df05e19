"use strict";

// -- formulas: LaTeX to MathML, which browsers draw --
//
// What is not known here is no formula: it stays on the page as it was written.

const MAX_FORMULA = 4000, MAX_NESTED = 40; // characters, levels

const entries = text => text.trim().split(/\s+/).map(entry => entry.split("="));
const GREEK = Object.fromEntries(entries(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω
	Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω
	infty=∞ hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅ varnothing=∅ nabla=∇ partial=∂ top=⊤ bot=⊥ imath=ı jmath=ȷ prime=′ angle=∠ triangle=△ square=□ degree=°`));
const OPERATORS = Object.fromEntries(entries(`times=× div=÷ cdot=⋅ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=• oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙ dagger=†
	leq=≤ le=≤ geq=≥ ge=≥ neq=≠ ne=≠ ll=≪ gg=≫ approx=≈ sim=∼ simeq=≃ cong=≅ equiv=≡ propto=∝ asymp=≍ doteq=≐ prec=≺ succ=≻
	in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇ nsubseteq=⊈ cup=∪ cap=∩ setminus=∖ land=∧ wedge=∧ lor=∨ vee=∨ lnot=¬ neg=¬ forall=∀ exists=∃ nexists=∄ therefore=∴ because=∵ models=⊨ vdash=⊢ mid=∣ nmid=∤ parallel=∥ perp=⊥
	to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ implies=⟹ impliedby=⟸ iff=⟺ longrightarrow=⟶ longleftarrow=⟵ mapsto=↦ uparrow=↑ downarrow=↓ hookrightarrow=↪ rightleftharpoons=⇌
	ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱ colon=: langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lvert=| rvert=| lVert=‖ rVert=‖ vert=| Vert=‖ lbrace={ rbrace=} backslash=\\ {={ }=} |=‖ %=% #=# &=& $=$ _=_`));
const LARGE = Object.fromEntries(entries("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀ int=∫ iint=∬ iiint=∭ oint=∮"));
const FUNCTIONS = new Set("arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom inf ker lg lim liminf limsup ln log max min Pr sec sin sinh sup tan tanh".split(" "));
const WITH_LIMITS = /^(lim|liminf|limsup|max|min|sup|inf|det|gcd|Pr|argmax|argmin)$/;
const ACCENTS = Object.fromEntries(entries("hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ dot=˙ ddot=¨ tilde=~ widetilde=~ check=ˇ breve=˘ overbrace=⏞ underline=_ underbrace=⏟"));
const SPACES = { ",": 0.17, ":": 0.22, ">": 0.22, ";": 0.28, "!": -0.17, " ": 0.3, quad: 1, qquad: 2, thinspace: 0.17 };
const IGNORED = /^(limits|nolimits|displaystyle|textstyle|scriptstyle|nonumber|notag|left\.|[bB]igg?[lrm]?)$/;
// Where the letters of an alphabet begin (capitals, small ones, digits), and those that stand elsewhere.
const ALPHABETS = {
	bold: [0x1d400, 0x1d41a, 0x1d7ce],
	bb: [0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
	cal: [0x1d49c, 0x1d4b6, 0, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }],
	frak: [0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
};
const FONTS = { mathbf: "bold", boldsymbol: "bold", bm: "bold", mathbb: "bb", mathcal: "cal", mathscr: "cal", mathfrak: "frak" };
const MATRICES = { matrix: "", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", smallmatrix: "", cases: "{", aligned: "", align: "", "align*": "", gathered: "", gather: "", "gather*": "", split: "", array: "", equation: "", "equation*": "" };

function mathElement(tag, attributes = {}, ...children) {
	const element = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
	for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
	element.append(...children);
	return element;
}

const inAlphabet = (text, alphabet) => [...text].map(letter => {
	const [capitals, small, digits, others = {}] = ALPHABETS[alphabet];
	const from = (start, first) => String.fromCodePoint(start + letter.charCodeAt(0) - first.charCodeAt(0));
	if (others[letter]) return others[letter];
	return /[A-Z]/.test(letter) ? from(capitals, "A") : /[a-z]/.test(letter) ? from(small, "a") : digits && /\d/.test(letter) ? from(digits, "0") : letter;
}).join("");

class UnknownFormula extends Error {}

class FormulaReader {
	constructor(source, isDisplay) {
		this.tokens = source.match(/\\([a-zA-Z]+\*?|[^])|\d+(\.\d+)?|\s+|[^]/gu) ?? [];
		this.at = 0;
		this.depth = 0;
		this.isDisplay = isDisplay;
	}

	get next() { return this.tokens[this.at]; }

	skipSpaces() { while (/^\s/.test(this.next ?? "")) this.at++; }

	/** Takes a token that must be there. */
	take(wanted) {
		this.skipSpaces();
		const token = this.tokens[this.at++];
		if (token === undefined || wanted && token !== wanted) throw new UnknownFormula();
		return token;
	}

	/** The text up to the brace that closes; the one that opens is next. */
	rawArgument() {
		this.take("{");
		let text = "";
		for (let depth = 1;;) {
			const token = this.tokens[this.at++];
			if (token === undefined) throw new UnknownFormula();
			depth += token === "{" ? 1 : token === "}" ? -1 : 0;
			if (!depth) return text;
			text += token;
		}
	}

	/** What comes until a token for which `ends` holds, which is not taken. */
	row(ends) {
		const nodes = [];
		if (++this.depth > MAX_NESTED) throw new UnknownFormula();
		for (;;) {
			this.skipSpaces();
			if (this.next === undefined ? ends(undefined) : ends(this.next)) break;
			if (this.next === undefined) throw new UnknownFormula();
			const node = this.scripted();
			if (node) nodes.push(node);
		}
		this.depth--;
		return nodes.length === 1 ? nodes[0] : mathElement("mrow", {}, ...nodes);
	}

	group() {
		this.take("{");
		const inner = this.row(token => token === "}");
		this.take("}");
		return inner;
	}

	/** An argument: a group, or one token. */
	argument() {
		this.skipSpaces();
		if (this.next === "{") return this.group();
		if (/^\d/.test(this.next ?? "") && this.next.length > 1) { // of a number only its first digit
			this.tokens.splice(this.at, 1, ...this.next);
		}
		const node = this.atom();
		if (!node) throw new UnknownFormula();
		return node;
	}

	/** An atom with what stands below and above it. */
	scripted() {
		const base = this.atom();
		let below, above, primes = "";
		for (;;) {
			this.skipSpaces();
			if (this.next === "'") { this.at++; primes += "′"; }
			else if (this.next === "_" && !below) { this.at++; below = this.argument(); }
			else if (this.next === "^" && !above) { this.at++; above = this.argument(); }
			else if (this.next === "_" || this.next === "^") throw new UnknownFormula();
			else if (/^\\(no)?limits$/.test(this.next ?? "")) this.at++;
			else break;
		}
		if (primes) {
			const mark = mathElement("mo", {}, primes);
			above = above ? mathElement("mrow", {}, mark, above) : mark;
		}
		if (!below && !above) return base;
		const around = base ?? mathElement("mrow");
		const isStacked = around.isStacked || this.isDisplay && around.hasLimits;
		const name = isStacked ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
		return mathElement(name[below && above ? 2 : above ? 1 : 0], {}, around, ...[below, above].filter(Boolean));
	}

	/** One thing; null for what is not drawn. */
	atom() {
		const token = this.take();
		if (token[0] === "\\") return this.command(token.slice(1));
		if (token === "{") {
			this.at--;
			return this.group();
		}
		if (/^\d/.test(token)) return mathElement("mn", {}, token);
		if (/^\p{L}/u.test(token)) return mathElement("mi", {}, token);
		if (/[&}^_$#%\\]/.test(token)) throw new UnknownFormula();
		if (token === "~") return mathElement("mspace", { width: "0.3em" });
		return mathElement("mo", token === "|" ? { stretchy: false, lspace: "0", rspace: "0" } : /[()[\]]/.test(token) ? { stretchy: false } : {}, token === "-" ? "−" : token === "*" ? "∗" : token);
	}

	command(name) {
		if (name in GREEK && Object.hasOwn(GREEK, name)) return mathElement("mi", /^[A-Z]/.test(name) ? { mathvariant: "normal" } : {}, GREEK[name]);
		if (Object.hasOwn(OPERATORS, name)) return mathElement("mo", /^[lr]?(vert|Vert|angle|floor|ceil|brace)|[{}|]/.test(name) ? { stretchy: false } : {}, OPERATORS[name]);
		if (Object.hasOwn(LARGE, name)) return Object.assign(mathElement("mo", {}, LARGE[name]), { hasLimits: !name.endsWith("int") });
		if (FUNCTIONS.has(name)) return Object.assign(mathElement("mi", {}, name), { hasLimits: WITH_LIMITS.test(name) });
		if (Object.hasOwn(SPACES, name)) return mathElement("mspace", { width: `${SPACES[name]}em` });
		if (IGNORED.test(name)) return null;
		if (Object.hasOwn(FONTS, name)) return mathElement("mi", {}, inAlphabet(this.letters(), FONTS[name]));
		if (Object.hasOwn(ACCENTS, name)) return this.accent(name);
		switch (name) {
			case "frac": case "dfrac": case "tfrac": case "cfrac":
				return mathElement("mfrac", {}, this.argument(), this.argument());
			case "binom": {
				const pair = mathElement("mfrac", { linethickness: "0" }, this.argument(), this.argument());
				return mathElement("mrow", {}, mathElement("mo", {}, "("), pair, mathElement("mo", {}, ")"));
			}
			case "sqrt": {
				this.skipSpaces();
				if (this.next !== "[") return mathElement("msqrt", {}, this.argument());
				this.take("[");
				const degree = this.row(token => token === "]");
				this.take("]");
				return mathElement("mroot", {}, this.argument(), degree);
			}
			case "text": case "textbf": case "textit": case "textrm": case "mbox": case "tag":
				return mathElement("mtext", {}, this.rawArgument().replaceAll(" ", "\u00a0"));
			case "mathrm": case "mathsf": case "mathtt": case "mathit":
				return mathElement("mi", name === "mathit" ? {} : { mathvariant: "normal" }, this.letters());
			case "operatorname": case "operatorname*": {
				const word = this.letters();
				return Object.assign(mathElement("mi", {}, word), { hasLimits: name.endsWith("*") || WITH_LIMITS.test(word) });
			}
			case "boxed": return mathElement("mrow", { class: "boxed" }, this.argument());
			case "pmod": return mathElement("mrow", {}, mathElement("mspace", { width: "0.5em" }), mathElement("mtext", {}, "(mod\u00a0"), this.argument(), mathElement("mo", {}, ")"));
			case "bmod": return mathElement("mo", {}, "mod");
			case "overset": case "stackrel": {
				const above = this.argument();
				return mathElement("mover", {}, this.argument(), above);
			}
			case "underset": {
				const below = this.argument();
				return mathElement("munder", {}, this.argument(), below);
			}
			case "left": return this.fenced();
			case "begin": return this.environment();
		}
		throw new UnknownFormula();
	}

	/** Letters and digits alone, in braces or one of them. */
	letters() {
		this.skipSpaces();
		const text = this.next === "{" ? this.rawArgument() : this.take();
		if (!/^[\p{L}\d\s.,*-]+$/u.test(text)) throw new UnknownFormula();
		return text.trim();
	}

	accent(name) {
		const inner = this.argument(), isBelow = name.startsWith("under");
		const mark = mathElement("mo", { stretchy: /wide|over|under/.test(name) }, ACCENTS[name]);
		const node = mathElement(isBelow ? "munder" : "mover", isBelow ? { accentunder: true } : { accent: true }, inner, mark);
		return Object.assign(node, { isStacked: name.endsWith("brace") });
	}

	fence() {
		const token = this.take();
		if (token === ".") return "";
		if (/^[()[\]|/<>]$/.test(token)) return { "<": "⟨", ">": "⟩" }[token] ?? token;
		const found = token[0] === "\\" && Object.hasOwn(OPERATORS, token.slice(1)) && OPERATORS[token.slice(1)];
		if (!found) throw new UnknownFormula();
		return found;
	}

	fenced() {
		const open = this.fence(), parts = [];
		for (;;) {
			parts.push(this.row(token => token === "\\right" || token === "\\middle"));
			if (this.take() === "\\right") break;
			parts.push(mathElement("mo", { stretchy: true }, this.fence()));
		}
		return this.between(open, this.fence(), ...parts);
	}

	between(open, close, ...nodes) {
		const mark = text => text ? [mathElement("mo", { stretchy: true }, text)] : [];
		return mathElement("mrow", {}, ...mark(open), ...nodes, ...mark(close));
	}

	environment() {
		const name = this.rawArgument();
		if (!Object.hasOwn(MATRICES, name)) throw new UnknownFormula();
		if (name === "array") this.rawArgument(); // how its columns are aligned
		const rows = [[]], ends = token => /^(&|\\\\|\\end)$/.test(token ?? "");
		for (;;) {
			rows.at(-1).push(mathElement("mtd", {}, this.row(ends)));
			const token = this.take();
			if (token === "\\end") break;
			if (token === "\\\\") {
				this.skipSpaces();
				if (this.next === "\\end") { this.at++; break; }
				rows.push([]);
			}
		}
		if (this.rawArgument() !== name) throw new UnknownFormula();
		const kind = /align|split|cases/.test(name) ? { class: name === "cases" ? "cases" : "aligned" } : {};
		const table = mathElement("mtable", kind, ...rows.map(cells => mathElement("mtr", {}, ...cells)));
		const [open = "", close = ""] = MATRICES[name];
		return this.between(open, close, table);
	}
}

/** A formula as MathML; null if there is something in it that is not known here. */
function formulaOf(source, isDisplay) {
	if (!source.trim() || source.length > MAX_FORMULA) return null;
	try {
		const inner = new FormulaReader(source, isDisplay).row(token => token === undefined);
		const math = mathElement("math", isDisplay ? { display: "block" } : {}, inner);
		return isDisplay ? make("span", { class: "formula", tabindex: 0, role: "group", "aria-label": "Formula" }, math) : math;
	} catch (error) {
		if (error instanceof UnknownFormula) return null;
		throw error;
	}
}

const FORMULA_ENDS = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };
const FORMULA_LINE = /^ {0,3}(\$\$|\\\[)/; // begins a block

/** The formula that begins in `text` at `start` with `run`: its node, and where it ends; or null. */
function formulaAt(text, start, run) {
	const from = start + run.length, close = FORMULA_ENDS[run];
	if (run === "$" && (/[\p{L}\p{N}]/u.test(text[start - 1] ?? "") || !/\S/.test(text[from] ?? ""))) return null;
	for (let end = text.indexOf(close, from); end >= 0 && end - from <= MAX_FORMULA; end = text.indexOf(close, end + 1)) {
		// A dollar ends a formula neither behind a blank, nor in front of a digit: there it is money.
		if (text[end - 1] === "\\" && close[0] === "$") continue;
		if (run === "$" && (/\s/.test(text[end - 1]) || /\d/.test(text[end + 1] ?? ""))) continue;
		const source = text.slice(from, end);
		const isMoney = run === "$" && /^\d[\d.,]*\s+(?!\\)\p{L}{2}/u.test(source);
		const node = isMoney ? null : formulaOf(source, close !== "$" && run !== "\\(");
		end += close.length;
		if (node) return { node, end };
		// Where a command is not known, nothing of it is read as Markdown either.
		return run !== "$" || !isMoney && source.includes("\\") ? { node: text.slice(start, end), end } : null;
	}
	return null;
}

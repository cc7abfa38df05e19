"use strict";

// -- text files that go with a question --

const MAX_FILE = 1 << 20; // bytes: more than most models can read
const CONTROLS = /[\0-\x07\x0e-\x1a\x1c-\x1f]/; // in binary files
let attached = [];

/** What the model reads: the files of a message, and then its text. */
function contentOf({ content, files = [] }) {
	const texts = files.map(({ name, text }) => {
		const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
		const fence = "`".repeat(longest + 1);
		return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
	});
	return [...texts, content].filter(Boolean).join("\n\n");
}

/** The text in the bytes of a file; `isGuess`: they may mean other letters. Undefined if they are no text. */
function textOf(bytes) {
	const begins = (...mark) => mark.every((byte, at) => bytes[at] === byte);
	const hasZeros = side => bytes.filter((byte, at) => !byte && at % 2 === side).length > bytes.length / 4;
	const wide = begins(0xff, 0xfe) || hasZeros(1) ? "utf-16le" : begins(0xfe, 0xff) || hasZeros(0) ? "utf-16be" : "";
	for (const encoding of wide ? [wide] : ["utf-8", "latin1"]) {
		try {
			const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
			if (!(encoding === "utf-8" ? /\0/ : CONTROLS).test(text)) return { text, isGuess: encoding === "latin1" };
		} catch {} // not in this encoding
	}
}

/** Attaches files to the question that is written. Says which cannot be. */
async function attach(files) {
	for (const file of files) {
		if (file.size > MAX_FILE) {
			say(`${file.name} is too large: up to 1 MiB can be attached.`);
			continue;
		}
		const found = textOf(new Uint8Array(await file.arrayBuffer()));
		if (found) attached.push({ name: file.name, text: found.text });
		if (!found) say(`${file.name} is no text: only text files can be attached, in UTF-8, UTF-16 or Latin-1.`);
		else if (found.isGuess) say(`${file.name} is not in UTF-8, and was read as Latin-1: see whether its letters are right.`);
	}
	showAttached();
}

const sizeOf = ({ text }) => text.length < 1000 ? counted(text.length, "character") : `${number(text.length / 1000, 1)} thousand characters`;

function showAttached() {
	$("attached").replaceChildren(...attached.map(file => make("span", { class: "plain" }, `${file.name} · ${sizeOf(file)} `,
		make("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, click: () => { attached = attached.filter(other => other !== file); showAttached(); } }, "×"))));
	$("attached").hidden = !attached.length;
	showBusy();
}

/** The files of a question, which unfold. */
const fileViews = ({ files = [] }) => files.map(file => make("details", { class: "attachment" }, make("summary", {}, `${file.name} · ${sizeOf(file)}`), make("pre", { tabindex: 0, dir: "auto" }, file.text)));

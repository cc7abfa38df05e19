"use strict";

// -- text files that go with a question --

const MAX_FILE = 1 << 20; // bytes: more than most models can read
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

/** Attaches files to the question that is written. Says which cannot be. */
async function attach(files) {
	for (const file of files) {
		if (file.size > MAX_FILE) {
			say(`${file.name} is too large: up to 1 MiB can be attached.`);
			continue;
		}
		try {
			const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
			if (text.includes("\0")) throw new TypeError("binary");
			attached.push({ name: file.name, text });
		} catch {
			say(`${file.name} is no text in UTF-8: only text files can be attached.`);
		}
	}
	showAttached();
}

const sizeOf = ({ text }) => text.length < 1000 ? `${text.length} characters` : `${number(text.length / 1000, 1)} thousand characters`;

function showAttached() {
	$("attached").replaceChildren(...attached.map(file => make("span", { class: "plain" }, `${file.name} · ${sizeOf(file)} `,
		make("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, click: () => { attached = attached.filter(other => other !== file); showAttached(); } }, "×"))));
	$("attached").hidden = !attached.length;
	showBusy();
}

/** The files of a question, which unfold. */
const fileViews = ({ files = [] }) => files.map(file => make("details", { class: "attachment" }, make("summary", {}, `${file.name} · ${sizeOf(file)}`), make("pre", { tabindex: 0, dir: "auto" }, file.text)));

"use strict";

// -- text files and images that go with a question --

const MAX_FILE = 1 << 20; // bytes: more than most models can read
const CONTROLS = /[\0-\x07\x0e-\x1a\x1c-\x1f]/; // in binary files
const NO_TEXT = /[^\t\n\r\P{C}]|[À-ÿ]/u; // in UTF-16 of other letters: controls, what Unicode does not assign, Latin letters
const WORDS = /^[\wÀ-ÿ£€°\s]*$/; // in Latin-1, without other signs
const IMAGES = /^image\/(png|jpeg|webp|gif)$/;
const SIDE = 1536, KEPT_CHARS = 400_000; // of an image: it is stored with its conversation, which has few megabytes
let attached = [];

const imagesOf = files => files.filter(({ url }) => url);
const seesImages = () => models.some(({ id, input_modalities: kinds = [] }) => id === $("model").value && kinds.includes("image"));

/** What a file has in place of a text: its text, and its images as they are attached. Only images in `data:` addresses. */
function fromParts(parts) {
	parts = parts.map(part => part ?? {});
	const images = parts.map(({ image_url }) => image_url?.url).filter(isImage);
	const text = parts.map(({ text = "" }) => `${text}`).join("");
	return images.length + parts.filter(({ text }) => isText(text)).length === parts.length && { content: text, files: images.map((url, at) => ({ name: `image ${at + 1}`, url })) };
}

const isImage = url => isText(url) && url.startsWith("data:image/");

/** What the model reads: the images and the files of a message, and then its text. */
function contentOf({ content, files = [] }) {
	const text = textWith(content, files.filter(({ url }) => !url)), images = imagesOf(files);
	if (!images.length) return text;
	const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
	return text ? [...parts, { type: "text", text }] : parts;
}

function textWith(content, files) {
	const texts = files.map(({ name, text }) => {
		const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
		const fence = "`".repeat(longest + 1);
		return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
	});
	return [...texts, content].filter(Boolean).join("\n\n");
}

/** The text in the bytes of a file; `guess`: an encoding in which they may mean other letters. Undefined if they are no text. */
function textOf(bytes) {
	const begins = (...mark) => mark.every((byte, at) => bytes[at] === byte);
	const hasZeros = side => bytes.filter((byte, at) => !byte && at % 2 === side).length > bytes.length / 4;
	const wide = begins(0xff, 0xfe) || hasZeros(1) ? "utf-16le" : begins(0xfe, 0xff) || hasZeros(0) ? "utf-16be" : "";
	const decoded = (encoding, isText, guess) => {
		try {
			const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
			if (isText(text)) return { text, guess };
		} catch {} // not in this encoding
	};
	const hasNoControls = text => !CONTROLS.test(text);
	if (wide) return decoded(wide, hasNoControls);
	// Text in UTF-16 has none of the zeros where it is in other letters than Latin ones. Its other side, which tells the
	// script, has few different bytes.
	const numOf = (text, form) => [...text.matchAll(form)].length;
	const isOdd = byte => byte > 0x7f || CONTROLS.test(String.fromCharCode(byte));
	const kinds = side => new Set(bytes.filter((_, at) => at % 2 === side)).size;
	const isWide = text => !areWords && !NO_TEXT.test(text) && numOf(text, /\p{L}/gu) > text.length / 2 && bytes.filter(isOdd).length >= bytes.length / 4;
	const areWords = WORDS.test(new TextDecoder("latin1").decode(bytes)); // such as "élan", which may be two letters in UTF-16
	const [likely, other] = kinds(1) <= kinds(0) ? ["utf-16le", "utf-16be"] : ["utf-16be", "utf-16le"];
	return decoded("utf-8", text => !text.includes("\0") && numOf(text, new RegExp(CONTROLS, "g")) <= text.length / 10)
		?? decoded(likely, isWide, "UTF-16") ?? decoded(other, isWide, "UTF-16")
		?? decoded("latin1", hasNoControls, "Latin-1");
}

const urlOf = blob => new Promise((resolve, reject) => {
	const reader = new FileReader();
	reader.onload = () => resolve(reader.result);
	reader.onerror = reject;
	reader.readAsDataURL(blob);
});

/** The `data:` address of an image; a large one is made smaller. Throws where the browser cannot read it. */
async function imageOf(file) {
	const bitmap = await createImageBitmap(file), given = await urlOf(file);
	if (given.length <= KEPT_CHARS) return given;
	const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
	const canvas = make("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
	const context = canvas.getContext("2d");
	context.fillStyle = "#fff"; // below what is transparent
	context.fillRect(0, 0, canvas.width, canvas.height);
	context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
	bitmap.close();
	return canvas.toDataURL("image/jpeg", 0.85);
}

async function attachImage(file) {
	if (!seesImages()) return say(`${file.name} cannot be attached: this model takes text only.`);
	try {
		attached.push({ name: file.name, url: await imageOf(file) });
	} catch {
		say(`${file.name} cannot be read as an image: PNG, JPEG, WebP and GIF can.`);
	}
}

/** Attaches files to the question that is written. Says which cannot be. */
async function attach(files) {
	for (const file of files) {
		if (IMAGES.test(file.type)) {
			await attachImage(file);
			continue;
		}
		if (file.size > MAX_FILE) {
			say(`${file.name} is too large: up to 1 MiB can be attached.`);
			continue;
		}
		const found = textOf(new Uint8Array(await file.arrayBuffer()));
		if (found) attached.push({ name: file.name, text: found.text });
		if (!found) say(`${file.name} is no text: only text files can be attached, in UTF-8, UTF-16 or Latin-1.`);
		else if (found.guess) say(`${file.name} is not in UTF-8, and was read as ${found.guess}: see whether its letters are right.`);
	}
	showAttached();
}

const sizeOf = ({ text, url }) => url ? `${number(url.length * 0.75e-3)} kB` : text.length < 1000 ? counted(text.length, "character") : `${number(text.length / 1000, 1)} thousand characters`;

function showAttached() {
	$("attached").replaceChildren(...attached.map(file => make("span", { class: "plain" }, ...preview(file), `${file.name} · ${sizeOf(file)} `,
		make("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, click: () => { attached = attached.filter(other => other !== file); showAttached(); } }, "×"))));
	$("attached").hidden = !attached.length;
	showBusy();
}

const preview = ({ url }) => url ? [make("img", { src: url, alt: "" })] : [];

/** The images of a question, and its files, which unfold. */
const fileViews = ({ files = [] }) => files.map(file => file.url ? make("img", { class: "image", src: file.url, alt: file.name }) : textView(file));
const textView = file => make("details", { class: "attachment" }, make("summary", {}, `${file.name} · ${sizeOf(file)}`), make("pre", { tabindex: 0, dir: "auto" }, file.text));

"use strict";

// -- settings --

const TEXTS = ["system", "thinking", "schema", "tools"];
const MOST = 2 ** 31 - 1;

/** The fields of a request that have a setting, by the names that the server gives them. */
const SAMPLING = {
	temperature: { kind: "number", min: 0, max: 2, about: "0 takes the likeliest token" },
	top_p: { kind: "number", min: 0, max: 1 },
	top_k: { kind: "count", min: -1, max: MOST, about: "0 or -1: off" },
	max_tokens: { kind: "count", min: 1, max: MOST },
	min_p: { kind: "number", min: 0, max: 1, isRare: true },
	top_n_sigma: { kind: "number", min: -1, max: 100, about: "0 or less: off", isRare: true },
	presence_penalty: { kind: "number", min: -2, max: 2, isRare: true },
	frequency_penalty: { kind: "number", min: -2, max: 2, isRare: true },
	repetition_penalty: { kind: "number", min: 0.000001, max: 1000000, about: "1: off", isRare: true },
	seed: { kind: "count", min: 0, max: Number.MAX_SAFE_INTEGER, about: "the same one gives the same answer", isRare: true },
	min_tokens: { kind: "count", min: 0, max: MOST, isRare: true },
	thinking_token_budget: { kind: "count", min: 0, max: MOST, isRare: true },
	stop: { kind: "lines", max: 16, about: "texts that end the answer", isRare: true },
	bad_words: { kind: "lines", max: 256, about: "texts that the answer must not have", isRare: true },
	stop_token_ids: { kind: "ids", max: 1024, isRare: true },
	allowed_token_ids: { kind: "ids", max: 32768, isRare: true },
	logit_bias: { kind: "bias", isRare: true },
	ignore_eos: { kind: "switch", isRare: true },
	include_stop_str_in_output: { kind: "switch", isRare: true },
	skip_special_tokens: { kind: "switch", isRare: true },
};

/** What a parameter may be, in words. */
function allowedFor({ kind, min, max }) {
	return {
		number: () => `${number(min, 6)} to ${number(max)}`,
		count: () => `a whole number, at least ${min}`,
		lines: () => `up to ${max}, one a line; \\n is a line break`,
		ids: () => `up to ${number(max)} token ids, with blanks or commas between them`,
		bias: () => 'JSON such as {"11": -5}: token ids, and numbers from -100 to 100',
		switch: () => "",
	}[kind]();
}

/** The value of a parameter that was typed; null if it is not allowed. */
function valueOf({ kind, min, max }, typed) {
	const inRange = (value, low, high) => Number.isFinite(value) && value >= low && value <= high;
	if (kind === "switch") return typed === "on";
	if (kind === "number" || kind === "count") {
		const value = Number(typed);
		return inRange(value, min, max) && (kind === "number" || Number.isInteger(value)) ? value : null;
	}
	if (kind === "lines") {
		const lines = typed.split("\n").filter(Boolean).map(line => line.replaceAll("\\n", "\n"));
		return lines.length <= max && lines.every(line => line.length <= 256) ? lines : null;
	}
	if (kind === "ids") {
		const ids = typed.split(/[\s,]+/).filter(Boolean).map(Number);
		return ids.length && ids.length <= max && ids.every(id => Number.isInteger(id) && inRange(id, 0, MOST)) ? ids : null;
	}
	const bias = parsed(typed);
	const fits = bias?.constructor === Object && Object.entries(bias).every(([id, value]) => /^(0|[1-9]\d{0,9})$/.test(id) && typeof value === "number" && inRange(value, -100, 100));
	return fits ? bias : null;
}

/** A value as it is typed. */
function typedOf({ kind }, value) {
	if (value === undefined) return "";
	if (kind === "switch") return value ? "on" : "off";
	if (kind === "lines") return [value].flat().map(line => line.replaceAll("\n", "\\n")).join("\n");
	if (kind === "ids") return [value].flat().join(", ");
	return kind === "bias" ? JSON.stringify(value) : String(value);
}

for (const [name, parameter] of Object.entries(SAMPLING)) {
	const { kind, isRare, about } = parameter;
	const facts = { id: name, class: "field", "aria-describedby": `${name}-hint` };
	const field = kind === "switch" ? make("select", facts, make("option", { value: "" }, "default"), make("option", {}, "on"), make("option", {}, "off"))
		: kind === "lines" ? make("textarea", { ...facts, rows: 2, spellcheck: false })
		: make("input", { ...facts, inputmode: /number|count/.test(kind) && parameter.min >= 0 ? "decimal" : null, placeholder: "default", autocomplete: "off" });
	const label = name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");
	const hint = make("small", { id: `${name}-hint`, "aria-live": "polite" });
	hint.about = [allowedFor(parameter), about].filter(Boolean).join("; ");
	$(isRare ? "rare" : "sampling").append(make("div", {}, make("label", { for: name }, label), field, hint));
}

/** What is wrong in the JSON of a setting; empty if nothing is. */
function wrongIn(name) {
	try {
		return !chat[name] || Array.isArray(JSON.parse(chat[name])) === (name === "tools") ? "" : `This must be ${name === "tools" ? "a list" : "an object"}.`;
	} catch (error) {
		return `This is no JSON: ${error.message}`;
	}
}

/** Says below a field what is wrong in it, or `about` if nothing is. */
function showWrong(name, wrong, about = "") {
	$(name).setCustomValidity(wrong);
	$(name).setAttribute("aria-invalid", !!wrong);
	const hint = $(`${name}-hint`);
	hint.classList.toggle("wrong", !!wrong);
	if (hint.textContent !== (wrong || about)) hint.textContent = wrong || about;
}

function openSettings() {
	for (const name of TEXTS) $(name).value = chat[name];
	for (const [name, parameter] of Object.entries(SAMPLING)) $(name).value = typedOf(parameter, chat.sampling[name]);
	if (Object.keys(chat.sampling).some(name => SAMPLING[name]?.isRare)) $("rare").parentElement.open = true;
	$("settings").showModal();
	readSettings();
	$("settings").querySelector(":invalid")?.focus();
}

function readSettings() {
	for (const name of TEXTS) chat[name] = $(name).value.trim();
	for (const name of ["schema", "tools"]) showWrong(name, wrongIn(name));
	for (const [name, parameter] of Object.entries(SAMPLING)) {
		const typed = $(name).value.trim() && $(name).value, value = typed ? valueOf(parameter, typed) : undefined;
		if (value == null) delete chat.sampling[name]; else chat.sampling[name] = value;
		const allowed = allowedFor(parameter);
		showWrong(name, value === null ? `Allowed: ${allowed}. Until then the model's own default is used.` : "", $(name).nextElementSibling.about);
	}
	const { system, sampling, thinking, schema, tools } = chat;
	localStorage.setItem(DEFAULTS, JSON.stringify({ system, sampling, thinking, schema, tools }));
	save(chat);
	showHead();
}

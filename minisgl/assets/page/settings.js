"use strict";

// -- settings --

const TEXTS = ["system", "thinking", "schema", "tools"];
const SAMPLING = { temperature: [0, 2], top_p: [0, 1], top_k: [-1], max_tokens: [1], seed: [0] };
for (const [name, [min, max]] of Object.entries(SAMPLING)) {
	const label = name[0].toUpperCase() + name.slice(1).replace("_", " ");
	$("sampling").append(make("div", {}, make("label", { for: name }, label), make("input", { id: name, class: "field", type: "number", min, max, step: max ? "any" : 1, placeholder: "default" })));
}

/** What is wrong in the JSON of a setting; empty if nothing is. */
function wrongIn(name) {
	try {
		return !chat[name] || Array.isArray(JSON.parse(chat[name])) === (name === "tools") ? "" : `This must be ${name === "tools" ? "a list" : "an object"}.`;
	} catch (error) {
		return `This is no JSON: ${error.message}`;
	}
}

function openSettings() {
	for (const name of TEXTS) $(name).value = chat[name];
	for (const name in SAMPLING) $(name).value = chat.sampling[name] ?? "";
	$("settings").showModal();
	readSettings();
	$("settings").querySelector(":invalid")?.reportValidity();
}

function readSettings() {
	for (const name of TEXTS) chat[name] = $(name).value.trim();
	for (const name of ["schema", "tools"]) $(name).setCustomValidity(wrongIn(name));
	for (const name in SAMPLING) {
		delete chat.sampling[name];
		if ($(name).value && $(name).validity.valid) chat.sampling[name] = $(name).valueAsNumber;
	}
	const { system, sampling, thinking, schema, tools } = chat;
	localStorage.setItem(DEFAULTS, JSON.stringify({ system, sampling, thinking, schema, tools }));
	save(chat);
	showHead();
}

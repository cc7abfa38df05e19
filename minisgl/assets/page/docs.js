"use strict";

const nav = document.querySelector("nav"), main = document.querySelector("main"), form = document.querySelector("form");
const DEEP = 12; // levels of types within types

function make(tag, attributes = {}, ...children) {
	const element = document.createElement(tag);
	for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
	element.append(...children);
	return element;
}

/** Shows types; those with a name are looked up in the description. */
class Types {
	constructor(schemas) {
		this.schemas = schemas;
	}

	nameOf(schema) { return schema.$ref?.split("/").at(-1); }

	/** A type in a line: `text, or list of Message`. */
	inWords(schema) {
		const choices = schema.anyOf ?? schema.oneOf;
		if (schema.$ref) return this.nameOf(schema);
		if (choices) return choices.map(choice => this.inWords(choice)).join(" or ");
		if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" or ");
		if ("const" in schema) return JSON.stringify(schema.const);
		if (schema.contentSchema) return `JSON of ${this.inWords(schema.contentSchema)}`;
		if (schema.type === "array") return `list of ${this.inWords(schema.items ?? schema.prefixItems?.[0] ?? {})}`;
		if (schema.type === "object" && schema.additionalProperties) return `object of ${this.inWords(schema.additionalProperties)}`;
		return { string: "text", null: "null", boolean: "true or false", integer: "whole number" }[schema.type] ?? schema.type ?? "anything";
	}

	limits({ minimum, maximum, exclusiveMinimum, minItems, maxItems, minLength, maxLength, pattern }) {
		const counted = (number, unit) => unit ? `${number} ${unit}${number === 1 ? "" : "s"}` : number;
		const limit = (low, high, unit) => [low != null && `at least ${counted(low, unit)}`, high != null && `at most ${counted(high, unit)}`];
		return [...limit(minimum, maximum), exclusiveMinimum != null && `more than ${exclusiveMinimum}`, ...limit(minItems, maxItems, "item"),
			...limit(minLength, maxLength, "character"), pattern && `form ${pattern}`].filter(Boolean).join(", ");
	}

	/** The limits of a type, or of those that it may be. */
	range(schema) {
		const found = [schema, ...schema.anyOf ?? []].map(choice => this.limits(choice)).filter(Boolean);
		return [...new Set(found)].join(", or ");
	}

	/** The named types with members that a type leads to. */
	* inside(schema) {
		const name = this.nameOf(schema);
		if (name) yield* this.schemas[name]?.properties ? [name] : this.inside(this.schemas[name] ?? {});
		for (const part of [...schema.anyOf ?? [], ...schema.oneOf ?? [], schema.items, schema.additionalProperties, schema.contentSchema]) if (part) yield* this.inside(part);
	}

	members(schema, depth = 0) {
		const { properties = {}, required = [] } = schema, list = make("dl");
		const names = Object.keys(properties), isRequired = name => required.includes(name);
		for (const name of [...names.filter(isRequired), ...names.filter(name => !isRequired(name))]) {
			const member = properties[name];
			const facts = [this.range(member), member.default != null && `default ${JSON.stringify(member.default)}`].filter(Boolean).join(", ");
			const about = make("dd", {}, make("span", { class: "of-type" }, [this.inWords(member), facts].filter(Boolean).join("; ")));
			if (member.description) about.append(make("p", {}, member.description));
			for (const example of member.examples ?? []) about.append(make("p", { class: "example" }, "Example: ", make("code", {}, `"${name}": ${JSON.stringify(example)}`)));
			if (depth < DEEP) for (const inner of new Set(this.inside(member))) about.append(this.folded(inner, depth + 1));
			list.append(make("dt", {}, name, isRequired(name) ? make("b", { title: "required" }, " *") : ""), about);
		}
		return list;
	}

	/** The members of a type, made when somebody looks at them: types may contain themselves. */
	folded(name, depth) {
		const details = make("details", {}, make("summary", {}, name)), schema = this.schemas[name];
		details.addEventListener("toggle", () => {
			if (schema.description) details.append(make("small", {}, schema.description));
			details.append(this.members(schema, depth));
		}, { once: true });
		return details;
	}

	/** What a body of this type is. */
	described(schema) {
		const name = this.nameOf(schema);
		if (name && this.schemas[name].properties) return [this.members(this.schemas[name])];
		return [make("span", { class: "of-type" }, this.inWords(schema)), ...[...new Set(this.inside(schema.properties?.data ?? schema))].map(inner => this.folded(inner, 1))];
	}
}

function show({ info, paths, components = {} }) {
	document.getElementById("said").textContent = `minisgl ${info.version}. Members with * are required. Tools read the same from /openapi.json.`;
	form.hidden = true;
	const types = new Types(components.schemas ?? {});
	for (const [path, methods] of Object.entries(paths)) {
		for (const [method, { summary, requestBody, parameters = [], responses, security }] of Object.entries(methods)) {
			const id = `${method}${path}`;
			nav.append(make("a", { href: `#${id}` }, path));
			const section = make("section", { id }, make("h2", {}, make("span", {}, method.toUpperCase()), path), make("p", {}, summary, security ? " Needs a key." : ""));
			for (const { name, in: place, description = "" } of parameters) section.append(make("p", {}, make("code", {}, name), ` in the ${place}. ${description}`));
			const body = requestBody?.content["application/json"];
			if (body) section.append(make("h3", {}, "Request"), ...types.described(body.schema));
			const failures = make("dl");
			for (const [status, { description, content = {} }] of Object.entries(responses)) {
				if (status >= 400) {
					failures.append(make("dt", {}, status), make("dd", {}, description));
					continue;
				}
				for (const [kind, { schema = {} }] of Object.entries(content)) {
					section.append(make("details", {}, make("summary", {}, kind === "text/event-stream" ? "Events, if streamed" : "Answer"), ...types.described(schema)));
				}
			}
			section.append(trial(method, path, { body, parameters }));
			if (failures.children.length) section.append(make("details", {}, make("summary", {}, "Errors"), failures));
			main.append(section);
		}
	}
	document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

/** A form that makes a request, and shows what the server answers as it comes. */
function trial(method, path, { body, parameters }) {
	const fields = parameters.map(({ name, in: place }) => [name, make("input", { "aria-label": name, placeholder: name, autocomplete: "off" }), place]);
	const written = body && make("textarea", { "aria-label": `Body of ${method.toUpperCase()} ${path}`, spellcheck: "false", rows: 6 });
	if (written) written.value = JSON.stringify(body.example ?? {}, null, 2);
	const command = make("pre", { tabindex: 0, "aria-label": "The same with curl" }), status = make("p", { role: "status" });
	const answer = make("pre", { tabindex: 0, "aria-label": "Answer" }), send = make("button", {}, "Send");
	answer.hidden = true;
	const asked = () => new URLSearchParams(fields.filter(([, field, place]) => place === "query" && field.value).map(([name, field]) => [name, field.value])).toString();
	const address = () => fields.reduce((url, [name, field]) => url.replace(`{${name}}`, encodeURIComponent(field.value)), path) + (asked() && `?${asked()}`);
	const url = () => new URL(address().slice(1), new URL("./", location.href)).href;
	const quoted = text => `'${text.replaceAll("'", `'\\''`)}'`;
	const describe = () => {
		const key = sessionStorage.getItem("minisgl.key") ? " -H \"Authorization: Bearer $MINISGL_API_KEY\"" : "";
		command.textContent = `curl${method === "get" ? "" : ` -X ${method.toUpperCase()}`} ${quoted(url())}${key}${written ? ` -H 'Content-Type: application/json' -d ${quoted(written.value)}` : ""}`;
	};
	let stopping = null;
	const run = async () => {
		stopping = new AbortController();
		send.textContent = "Stop";
		answer.hidden = false;
		answer.textContent = "";
		status.textContent = "Waiting for the answer…";
		const key = sessionStorage.getItem("minisgl.key"), began = performance.now();
		const told = code => { status.textContent = `${code} after ${Math.round(performance.now() - began)} ms`; };
		try {
			const response = await fetch(url(), { method: method.toUpperCase(), body: written?.value, signal: stopping.signal,
				headers: { ...(written && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) } });
			const isJSON = /json/.test(response.headers.get("content-type") ?? "");
			const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
			for (let part; !(part = await reader.read()).done;) answer.append(part.value);
			if (isJSON && answer.textContent.length < 100000) answer.textContent = JSON.stringify(JSON.parse(answer.textContent), null, 2);
			told(`Status ${response.status}`);
		} catch {
			told(stopping.signal.aborted ? "Stopped" : "The server does not answer; given up");
		}
		stopping = null;
		send.textContent = "Send";
	};
	const form = make("form", { class: "trial" }, ...fields.map(([, field]) => field), ...(written ? [written] : []), command, send, status, answer);
	form.addEventListener("input", describe);
	form.addEventListener("submit", event => {
		event.preventDefault();
		if (stopping) stopping.abort(); else run();
	});
	const details = make("details", {}, make("summary", {}, "Try it"), form);
	details.addEventListener("toggle", describe);
	return details;
}

async function load() {
	const said = document.getElementById("said"), key = sessionStorage.getItem("minisgl.key");
	try {
		const response = await fetch("openapi.json", { headers: key ? { authorization: `Bearer ${key}` } : {} });
		if (response.ok) return show(await response.json());
		form.hidden = response.status !== 401;
		said.textContent = response.status !== 401 ? `The server answered with status ${response.status}.`
			: key ? "The server does not accept this key. Check it and try again." : "This server asks for a key. It is kept in this tab only.";
		if (!form.hidden) form.firstElementChild.focus();
	} catch {
		said.textContent = "The server does not answer. Reload the page to try again.";
	}
}

form.addEventListener("submit", event => {
	event.preventDefault();
	sessionStorage.setItem("minisgl.key", form.firstElementChild.value.trim());
	load();
});
load();

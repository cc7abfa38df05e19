"use strict";

const $ = id => document.getElementById(id);

/** Makes an element. Functions among the attributes are listeners; children are nodes or texts. */
function make(tag, attributes = {}, ...children) {
	const namespace = /^(svg|path|use)$/.test(tag) ? "2000/svg" : "1999/xhtml";
	const element = document.createElementNS(`http://www.w3.org/${namespace}`, tag);
	for (const [name, value] of Object.entries(attributes)) {
		if (typeof value === "function") element.addEventListener(name, value);
		else if (value != null && value !== false) element.setAttribute(name, value);
	}
	element.append(...children);
	return element;
}

const icon = name => make("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": true }, make("use", { href: `#${name}` }));
const iconButton = (name, title, click) => make("button", { class: "quiet", title, click }, icon(name));
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
const counted = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
const seconds = s => s < 1 ? `${number(s * 1e3, s < 0.01 ? 1 : 0)} ms` : `${number(s, 1)} s`;
const percent = share => `${number(100 * share)}\u00a0%`;

function copyButton(text) {
	const button = iconButton("copy", "Copy", async () => {
		try {
			await navigator.clipboard.writeText(text());
		} catch { // only pages from HTTPS or this machine have a clipboard
			const area = document.body.appendChild(make("textarea"));
			area.value = text();
			area.select();
			document.execCommand("copy");
			area.remove();
		}
		button.replaceChildren(icon("done"));
		setTimeout(() => button.replaceChildren(icon("copy")), 1200);
	});
	return button;
}

/** Says something in the banner; `isLasting`: until it is replaced or hidden. */
function say(text, isLasting = false) {
	const banner = $("banner"), [said, bar] = banner.children;
	said.textContent = text;
	banner.hidden = !text;
	bar.hidden = true;
	clearTimeout(say.timer);
	if (!isLasting) say.timer = setTimeout(say, 9000, "", true);
}

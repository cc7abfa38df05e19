"use strict";

// -- requests --

class APIError extends Error {}

/** Makes a request, and asks for the key where the server wants one. Throws APIError or TypeError. */
async function call(path, options = {}) {
	for (let wasAsked = false;; wasAsked = true) {
		const key = sessionStorage.getItem("minisgl.key");
		const response = await fetch(path, { ...options, headers: { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) } });
		if (response.ok) return response;
		const { error } = await response.json().catch(() => ({}));
		if (response.status !== 401 || !await askForKey(wasAsked || key)) throw new APIError(error?.message ?? `The server answered with status ${response.status}.`);
	}
}

let asking; // one dialog for all requests that wait
function askForKey(wasWrong) {
	return asking ??= new Promise(resolve => {
		const dialog = $("key-dialog");
		let given = "";
		$("key-hint").textContent = wasWrong ? "The server does not accept this key. Check it and try again." : "It is kept in this tab only, until you close it.";
		$("key").value = "";
		dialog.onsubmit = event => {
			event.preventDefault();
			given = $("key").value.trim();
			sessionStorage.setItem("minisgl.key", given);
			dialog.close();
		};
		dialog.onclose = () => { asking = null; resolve(!!given); };
		dialog.showModal();
	});
}

/** The data of server-sent events, wherever the network cuts them. */
async function* eventsOf(body) {
	const reader = body.pipeThrough(new TextDecoderStream()).getReader();
	let buffer = "", data = "";
	for (let part; !(part = await reader.read()).done;) {
		let at = 0, from = buffer.length;
		buffer += part.value;
		for (let end; (end = buffer.indexOf("\n", from)) >= 0; at = from = end + 1) {
			const line = buffer.slice(at, end).replace(/\r$/, "");
			if (line.startsWith("data:")) data += line.slice(5);
			else if (!line && data) { yield data.trim(); data = ""; }
		}
		buffer = buffer.slice(at);
	}
}

/** Waits for the server, says what it is doing, and learns its models. */
async function waitForServer() {
	for (;; await new Promise(resolve => setTimeout(resolve, 1000))) {
		try {
			const health = await fetch("health");
			if (health.ok) break;
			say((await health.json()).error.message, true);
			const loading = /^minisgl_loading_ratio{.* (\S+)$/m.exec(await (await fetch("metrics")).text());
			const bar = $("banner").lastChild;
			bar.hidden = !loading;
			if (loading && +loading[1]) bar.value = loading[1]; else bar.removeAttribute("value");
		} catch {
			say("The server does not answer. Trying again until it does…", true);
		}
	}
	say("");
	try {
		models = (await (await call("v1/models")).json()).data;
	} catch (error) {
		if (!(error instanceof APIError)) return waitForServer();
		say(error.message);
	}
	$("model").replaceChildren(...models.map(({ id }) => make("option", {}, id)));
	$("model").hidden = !models.length;
	const other = { embed: "makes vectors of texts: see /v1/embeddings", rerank: "scores documents: see /v1/rerank" }[models[0]?.task];
	if ($("scroller").hidden = $("composer").hidden = !!other) say(`This model ${other}.`, true);
	showHead();
}

let models = [], waiting;
const watchServer = () => waiting ??= waitForServer().finally(() => { waiting = null; });

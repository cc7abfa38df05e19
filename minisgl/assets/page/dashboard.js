"use strict";

// -- the server at work --

const INTERVAL = 2, WINDOW = 15; // seconds between samples, and of a rate or quantile
const RECENT = 300; // seconds of which all samples are kept; of older ones, one for each window
const SPANS = { "5 minutes": 300, "1 hour": 3600 };

const latest = {}, totals = {}; // of counters: by series, and by replica their growth over restarts

/** The value of each series in a page of /metrics. */
function seriesOf(text) {
	return Object.fromEntries([...text.matchAll(/^(minisgl_\w+(?:{.*})?) (\S+)$/gm)].map(([, series, value]) => [series, +value]));
}

/**
 * A sample from the values of series: for all replicas under "", and for each under its name, the
 * sums of gauges and the growth of counters. `time`: seconds, of the clock.
 */
function readSample(series, time) {
	const of = {};
	const partOf = name => of[name] ??= { time, sums: {}, buckets: {}, replicas: 0 };
	const add = (sums, key, value) => { sums[key] = (sums[key] ?? 0) + value; };
	for (const [name, value] of Object.entries(series)) {
		const [, figure, isCounter, labels = ""] = /^minisgl_(\w+?)(_total|_bucket)?(?:{(.*)})?$/.exec(name);
		const [, replica] = /^replica="([^"]*)"/.exec(labels) ?? [], [, bound] = /(?:^|,)le="([^"]*)"$/.exec(labels) ?? [];
		if (figure.startsWith("router_")) continue;
		const growth = isCounter ? value - (value < latest[name] ? 0 : latest[name] ?? value) : 0;
		if (isCounter) latest[name] = value;
		for (const owner of replica === undefined ? [""] : ["", replica]) {
			const part = partOf(owner);
			if (figure === "running_requests") part.replicas++;
			if (!isCounter) { add(part.sums, figure, value); continue; }
			const kept = totals[owner] ??= { sums: {}, buckets: {} };
			add(bound ? kept.buckets[figure] ??= {} : kept.sums, bound ?? figure, growth);
		}
	}
	for (const [owner, part] of Object.entries(of)) {
		Object.assign(part.sums, totals[owner]?.sums);
		part.buckets = structuredClone(totals[owner]?.buckets ?? {});
	}
	return { time, of };
}

/** The samples of /metrics/history, the oldest first. */
function readHistory({ seconds: step, replicas }) {
	const slots = {};
	for (const [replica, { slots: own, series }] of Object.entries(replicas)) {
		const label = replica && `replica="${replica}"`;
		for (const [name, values] of Object.entries(series)) {
			const labelled = !label ? name : name.includes("{") ? name.replace("{", `{${label},`) : `${name}{${label}}`;
			own.forEach((slot, index) => { (slots[slot] ??= {})[labelled] = values[index]; });
		}
	}
	return Object.entries(slots).map(([slot, series]) => readSample(series, slot * step)); // keys that are numbers are in order
}

const NOW = "now", LATELY = `over ${WINDOW} s`;
const gauge = name => ({ sums }) => sums[name];
const change = (now, then, name) => now.sums[name] - then.sums[name];
const rate = name => (now, then) => change(now, then, name) / (now.time - then.time);
const hitRate = (now, then) => change(now, then, "cached_prompt_tokens") / change(now, then, "prompt_tokens");
const quantile = (name, share) => (now, then) => {
	const counts = Object.entries(now.buckets[name] ?? {}).map(([bound, count]) => [+bound, count - (then.buckets[name]?.[bound] ?? 0)]);
	const rank = share * counts.at(-1)?.[1];
	const index = counts.findIndex(([, count]) => count && count >= rank);
	if (index < 0) return NaN;
	const [low, before] = counts[index - 1] ?? [0, 0], [high, count] = counts[index];
	return high > low ? low + (high - low) * (rank - before) / (count - before) : low; // +Inf is NaN
};
const latency = (title, name) => [title, LATELY, seconds, { median: quantile(name, 0.5), "99th percentile": quantile(name, 0.99) }];


// What few servers have: snapshots of states, and speculation.
const SNAPSHOTS = "of the snapshots of states", DRAFTS = "of the guesses", RARE = [SNAPSHOTS, DRAFTS];
const acceptance = (now, then) => change(now, then, "accepted_draft_tokens") / change(now, then, "drafted_tokens");
const CHARTS = [
	["Requests", NOW, number, { running: gauge("running_requests"), waiting: gauge("queued_requests") }],
	["Tokens per second", `mean ${LATELY}`, number, { generated: rate("generated_tokens"), "of prompts": rate("prompt_tokens") }],
	["KV cache in use", NOW, percent, { "of its pages": ({ sums, replicas }) => sums.token_usage_ratio / replicas, [SNAPSHOTS]: ({ sums }) => sums.snapshots_cached / sums.snapshots }, 1],
	["Prefix cache", LATELY, percent, { "of prompt tokens found": hitRate }, 1],
	["Guessed tokens that were right", LATELY, percent, { [DRAFTS]: acceptance }, 1],
	latency("Time to first token", "time_to_first_token_seconds"),
	latency("Time between tokens", "inter_token_seconds"),
	latency("Whole requests", "request_seconds"),
	latency("Steps of the engine", "step_seconds"),
];
const WIDTH = 150; // of a chart's drawing, 100 high

const clock = time => new Date(time * 1000).toLocaleTimeString("en-GB");
const said = (format, value) => Number.isFinite(value) ? format(value) : "–";

/** The top of a scale for these values. One peak does not flatten the others: it is cut. */
function topFor(values) {
	const sorted = values.filter(value => Number.isFinite(value) && value > 0).sort((a, b) => a - b);
	const most = sorted.at(-1) ?? 0, usual = sorted[Math.ceil(0.95 * sorted.length) - 1] ?? 0;
	const round = wanted => {
		const unit = 10 ** Math.floor(Math.log10(wanted || 1));
		return [1, 2, 5, 10].find(step => step * unit >= wanted * (1 - 1e-9)) * unit;
	};
	const cut = round(1.5 * usual), isCut = sorted.length >= 20 && most > 2 * cut;
	return { top: isCut ? cut : round(most), most };
}

class Chart {
	constructor([title, covers, format, series, top]) {
		const names = Object.keys(series);
		Object.assign(this, { title, names, format, top, values: Object.values(series), points: [] });
		this.shown = names.map(() => make("dd"));
		this.area = make("path", { class: "area" });
		this.lines = names.map((_, index) => make("path", { class: `line${index}` }));
		this.mark = make("path", { class: "mark" });
		const svg = make("svg", { viewBox: `0 0 ${WIDTH} 100`, preserveAspectRatio: "none", "aria-hidden": true }, make("path", { d: `M0 0h${WIDTH}M0 50h${WIDTH}M0 100h${WIDTH}` }), this.area, ...this.lines, this.mark);
		const legend = names.map((name, index) => make("div", {}, make("dt", {}, name), this.shown[index]));
		const plot = make("div", {
			class: "plot", tabindex: 0, role: "img", "aria-label": `${title}; the arrow keys go through the values`,
			pointermove: ({ clientX, currentTarget }) => {
				const { left, width } = currentTarget.getBoundingClientRect();
				this.#pointAt(this.#nearest((clientX - left) / width * WIDTH));
			},
			pointerleave: () => this.#pointAt(null),
			blur: () => this.#pointAt(null),
			keydown: event => {
				const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
				if (!by || !this.points.length) return;
				event.preventDefault();
				const at = this.points.findIndex(({ time }) => time === this.chosen);
				this.#pointAt(this.points[Math.min(Math.max(at < 0 ? this.points.length - 1 : at + by, 0), this.points.length - 1)].time);
			},
		}, svg);
		this.element = make("section", { class: "card" }, make("h2", {}, title, " ", make("small", {}, covers)), make("dl", {}, ...legend), plot,
			make("div", { class: "axis" }, this.span = make("span"), this.bound = make("span")), this.told = make("p", { class: "told", role: "status" }));
	}

	/** Draws the points, each with its time and values, of so many seconds before the last one. */
	draw(points, seconds) {
		const last = points.at(-1), end = last?.time ?? 0;
		Object.assign(this, { end, seconds, points: points.filter(({ time }) => time >= end - seconds) });
		this.names.forEach((name, index) => {
			this.shown[index].textContent = said(this.format, last?.values[index]);
			this.shown[index].parentNode.hidden = name === SNAPSHOTS && !Number.isFinite(last?.values[index]);
		});
		this.element.hidden = this.names.every(name => RARE.includes(name)) && !this.points.some(({ values }) => values.some(Number.isFinite));
		const { top, most } = topFor(this.points.flatMap(({ values }) => values));
		this.most = this.top ?? top;
		this.span.textContent = `last ${Object.keys(SPANS).find(name => SPANS[name] === seconds)}`;
		this.bound.textContent = `up to ${this.format(this.most)}${most > this.most ? `; a peak of ${this.format(most)} is cut` : ""}`;
		this.lines.forEach((line, index) => line.setAttribute("d", this.#path(index)));
		this.area.setAttribute("d", this.#path(0, true));
		this.#pointAt(this.chosen);
	}

	#x(time) { return +(WIDTH * (1 - (this.end - time) / this.seconds)).toFixed(2); }

	/** A line through the values, with gaps where there are none; closed at the bottom if an area. */
	#path(index, isArea = false) {
		let path = "", from = null, before = null, x;
		const close = () => {
			if (isArea && from !== null) path += `V100H${from}Z`;
			from = null;
		};
		for (const { time, values } of this.points) {
			if (!Number.isFinite(values[index]) || time - before > 4 * WINDOW) close();
			if (!Number.isFinite(values[index])) continue;
			x = this.#x(time);
			path += `${from === null ? "M" : "L"}${x} ${(100 - 100 * Math.min(1, values[index] / this.most)).toFixed(2)}`;
			from ??= x;
			before = time;
		}
		close();
		return path;
	}

	#nearest(x) {
		const distance = ({ time }) => Math.abs(this.#x(time) - x);
		return this.points.length ? this.points.reduce((best, point) => distance(point) < distance(best) ? point : best).time : null;
	}

	/** Says the values at a time; null: none is chosen. */
	#pointAt(time) {
		const point = this.points.find(point => point.time === time);
		this.chosen = point ? time : null;
		this.mark.setAttribute("d", point ? `M${this.#x(time)} 0V100` : "");
		const text = point ? `${clock(time)} · ${this.names.map((name, index) => `${name} ${said(this.format, point.values[index])}`).join(" · ")}` : "";
		if (this.told.textContent !== text) this.told.textContent = text;
	}
}

const dashboard = {
	samples: [], // the oldest first
	charts: CHARTS.map(chart => new Chart(chart)),
	replica: "", // whose figures are drawn; "": of all

	show(isShown) {
		clearInterval(this.timer);
		if (!isShown) return;
		$("charts").replaceChildren(...this.charts.map(({ element }) => element));
		this.timer = setInterval(() => this.sample(), INTERVAL * 1000);
		this.sample();
	},

	/** Reads what was while nobody looked, if the server knows of it. */
	async readBefore() {
		const response = await fetch("metrics/history");
		if (!response.ok) return;
		const history = await response.json();
		if (!Object.values(history.replicas).some(({ slots }) => slots.length)) return;
		for (const known of [latest, totals]) for (const name in known) delete known[name];
		this.samples = readHistory(history);
	},

	async sample() {
		if (document.hidden) return;
		try {
			const seen = this.samples.at(-1)?.time ?? -Infinity;
			if (Date.now() / 1000 - seen > 4 * WINDOW) await this.readBefore();
			const text = await (await fetch("metrics")).text(), now = readSample(seriesOf(text), Date.now() / 1000);
			const [, model, version] = /^minisgl_info{.*model="(.*)",version="(.*)"}/m.exec(text) ?? [];
			this.roles = Object.fromEntries([...text.matchAll(/^minisgl_router_replica_role{.*replica="(.*?)",role="(.*?)"}/gm)].map(([, replica, role]) => [replica, role]));
			$("server").firstElementChild.textContent = `${model} on minisgl ${version}`;
			this.add(now);
			this.draw();
		} catch (error) {
			if (!(error instanceof TypeError)) throw error;
			watchServer();
		}
	},

	/** Keeps a sample, and of those that are no longer recent one for each window. */
	add(now) {
		const slot = ({ time }) => Math.floor(time / WINDOW), { samples } = this;
		samples.push(now);
		this.samples = samples.filter((sample, index) => {
			const age = now.time - sample.time;
			return age >= 0 && age < SPANS["1 hour"] + WINDOW && (age < RECENT || !index || slot(sample) !== slot(samples[index - 1]));
		});
	},

	/** The values of a chart at each sample, for one replica. */
	pointsOf(chart, replica) {
		let first = 0;
		return this.samples.map(({ time, of }, index) => {
			while (first < index - 1 && this.samples[first + 1].time <= time - WINDOW) first++;
			const now = of[replica], then = this.samples[first].of[replica] ?? now;
			return { time, values: chart.values.map(value => now ? value(now, then) : NaN) };
		});
	},

	draw() {
		const seconds = SPANS[$("span").value];
		for (const chart of this.charts) chart.draw(this.pointsOf(chart, this.replica), seconds);
		this.drawReplicas();
	},

	/** A row for each replica, from which its own charts are chosen. */
	drawReplicas() {
		const names = Object.keys(this.samples.at(-1)?.of ?? {}).filter(name => name !== "");
		if (this.replica && !names.includes(this.replica)) names.push(this.replica); // it has ended
		$("replicas").hidden = !names.length;
		if (!names.length) return;
		const roles = Object.keys(this.roles).length > 0, shown = this.charts.slice(0, 4);
		const figures = shown.flatMap(({ names, title }) => names.map(name => names.length === 1 ? title : title.startsWith("Tokens") ? `tokens/s ${name}` : name));
		const row = name => make("tr", { "aria-current": name === this.replica && "true" },
			make("th", { scope: "row" }, make("button", { class: "quiet", "aria-pressed": name === this.replica, "data-replica": name, click: () => this.choose(name) }, name === "" ? "All" : `Replica ${name}`)),
			...(roles ? [make("td", {}, this.roles[name] ?? "")] : []),
			...shown.flatMap(chart => (this.pointsOf(chart, name).at(-1)?.values ?? []).map(value => make("td", {}, said(chart.format, value)))));
		const focused = document.activeElement?.dataset.replica;
		$("replicas").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...["", ...(roles ? ["role"] : []), ...figures].map(name => make("th", { scope: "col" }, name || "Engine")))),
			make("tbody", {}, ...["", ...names.sort((a, b) => a.localeCompare(b, "en", { numeric: true }))].map(row))));
		if (focused !== undefined) $("replicas").querySelector(`[data-replica="${CSS.escape(focused)}"]`)?.focus();
	},

	choose(replica) {
		this.replica = replica;
		this.draw();
	},
};

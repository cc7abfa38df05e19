"use strict";

// -- the server at work --

const SAMPLES = 150, INTERVAL = 2, WINDOW = 15; // seconds between samples, and of a rate or quantile

const latest = {}, grown = {}, buckets = {}; // of counters: by series, by name, by name and bound

/** /metrics of all replicas, by name: sums of gauges, and the growth of counters over restarts. */
function readMetrics(text) {
	const [[, model, version] = [], ...others] = text.matchAll(/^minisgl_info{.*model="(.*)",version="(.*)"}/gm);
	const sums = {}, add = (sums, key, value) => sums[key] = (sums[key] ?? 0) + value;
	for (const [, series, name, isCounter, bound, value] of text.matchAll(/^(minisgl_(\w+?)(_total|_bucket)?(?:{.*?(?:le="(.*)")?})?) (\S+)$/gm)) {
		if (isCounter) {
			const growth = value - (value < latest[series] ? 0 : latest[series] ?? value);
			latest[series] = +value;
			add(bound ? buckets[name] ??= {} : grown, bound ?? name, growth);
		} else add(sums, name, +value);
	}
	return { time: performance.now() / 1000, info: `${model} on minisgl ${version}`, replicas: 1 + others.length, sums: { ...sums, ...grown }, buckets: structuredClone(buckets) };
}

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
const latency = (title, name) => [title, seconds, { median: quantile(name, 0.5), "99th percentile": quantile(name, 0.99) }];

const CHARTS = [
	["Requests", number, { running: gauge("running_requests"), waiting: gauge("queued_requests") }],
	["Tokens per second", number, { generated: rate("generated_tokens"), "of prompts": rate("prompt_tokens") }],
	["KV cache in use", percent, { "of its pages": ({ sums, replicas }) => sums.token_usage_ratio / replicas }, 1],
	["Prefix cache", percent, { "of prompt tokens found": hitRate }, 1],
	latency("Time to first token", "time_to_first_token_seconds"),
	latency("Time between tokens", "inter_token_seconds"),
	latency("Whole requests", "request_seconds"),
	latency("Steps of the engine", "step_seconds"),
];

const spanOf = points => Math.max(points.length, 30); // the samples that a chart has room for

class Chart {
	constructor([title, format, series, top]) {
		const names = Object.keys(series);
		Object.assign(this, { format, top, values: Object.values(series) });
		this.points = names.map(() => []);
		this.shown = names.map(() => make("dd"));
		this.area = make("path", { class: "area" });
		this.lines = names.map((_, index) => make("path", { class: `line${index}` }));
		const svg = make("svg", { viewBox: `0 0 ${SAMPLES} 100`, preserveAspectRatio: "none", "aria-hidden": true }, make("path", { d: `M0 0h${SAMPLES}M0 50h${SAMPLES}M0 100h${SAMPLES}` }), this.area, ...this.lines);
		const legend = names.map((name, index) => make("div", {}, make("dt", {}, name), this.shown[index]));
		this.element = make("section", { class: "card" }, make("h2", {}, title), make("dl", {}, ...legend), svg,
			make("div", { class: "axis" }, this.span = make("span"), this.bound = make("span")));
	}

	add(now, then) {
		this.points.forEach((points, index) => {
			points.push(this.values[index](now, then));
			if (points.length > SAMPLES) points.shift();
			this.shown[index].textContent = Number.isFinite(points.at(-1)) ? this.format(points.at(-1)) : "–";
		});
		const most = Math.max(...this.points.flat().filter(Number.isFinite), 0), unit = 10 ** Math.floor(Math.log10(most || 1));
		const top = this.top ?? [1, 2, 5, 10].find(step => step * unit >= most) * unit;
		this.span.textContent = `last ${seconds(INTERVAL * spanOf(this.points[0]))}`;
		this.bound.textContent = `up to ${this.format(top)}`;
		this.lines.forEach((line, index) => line.setAttribute("d", this.#path(this.points[index], top)));
		this.area.setAttribute("d", this.#path(this.points[0], top, true));
	}

	/** A line through the points, with gaps where there is none; closed at the bottom if an area. */
	#path(points, top, isArea = false) {
		let path = "", from = null;
		const span = spanOf(points);
		[...points, NaN].forEach((value, index) => {
			const x = (span - points.length + index) * SAMPLES / (span - 1);
			if (Number.isFinite(value)) {
				path += `${from === null ? "M" : "L"}${x} ${(100 - 100 * value / top).toFixed(2)}`;
				from ??= x;
			} else {
				if (isArea && from !== null) path += `V100H${from}Z`;
				from = null;
			}
		});
		return path;
	}
}

const dashboard = {
	last: [], // samples of the window
	charts: CHARTS.map(chart => new Chart(chart)),

	show(isShown) {
		clearInterval(this.timer);
		if (!isShown) return;
		$("charts").replaceChildren(...this.charts.map(({ element }) => element));
		this.timer = setInterval(() => this.sample(), INTERVAL * 1000);
		this.sample();
	},

	async sample() {
		if (document.hidden) return;
		try {
			const now = readMetrics(await (await fetch("metrics")).text());
			this.last = this.last.filter(({ time }) => time > now.time - WINDOW);
			this.last.push(now);
			for (const chart of this.charts) chart.add(now, this.last[0]);
			$("server").firstElementChild.textContent = now.info;
		} catch {
			watchServer();
		}
	},
};

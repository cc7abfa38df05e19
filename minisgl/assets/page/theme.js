"use strict";

// The theme of all pages of this server, in this browser; in the head, so that nothing flashes.

const THEME = "minisgl.theme";
const takeTheme = () => { document.documentElement.dataset.theme = localStorage.getItem(THEME) ?? ""; };
takeTheme();
window.addEventListener("storage", takeTheme); // chosen in another tab

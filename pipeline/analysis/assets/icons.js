// DaCe's wheel comes without the icon font of its viewer, which would show the icons' names instead. This draws them.
"use strict";
(() => {
    const SHAPES = {
        menu: "M4 7h16M4 12h16M4 17h16",
        settings: "M12 9a3 3 0 1 0 0 6a3 3 0 1 0 0-6M12 3v3M12 18v3M3 12h3M18 12h3M5.6 5.6l2.1 2.1M16.3 16.3l2.1 2.1M5.6 18.4l2.1-2.1M16.3 7.7l2.1-2.1",
        saved_search: "M10.5 4.5a6 6 0 1 0 0 12a6 6 0 1 0 0-12M15 15l5 5M8 10.5h5M10.5 8v5",
        fit_screen: "M4 9V5h4M16 5h4v4M20 15v4h-4M8 19H4v-4M8.5 9h7v6h-7z",
        fit_width: "M4 5v14M20 5v14M7 12h10M10 9l-3 3l3 3M14 9l3 3l-3 3",
        unfold_less: "M8 4l4 4l4-4M8 20l4-4l4 4M5 12h14",
        unfold_more: "M8 9l4-4l4 4M8 15l4 4l4-4",
        pan_tool: "M12 3v18M3 12h18M9 6l3-3l3 3M9 18l3 3l3-3M6 9l-3 3l3 3M18 9l3 3l-3 3",
        open_with: "M5 19L19 5M13 5h6v6M5 13v6h6",
        select: "M5 8V5h3M11 5h2M16 5h3v3M19 11v2M19 16v3h-3M13 19h-2M8 19H5v-3M5 13v-2",
        content_cut: "M6 4l9 13M18 4L9 17M7 16a2.5 2.5 0 1 0 0 5a2.5 2.5 0 1 0 0-5M17 16a2.5 2.5 0 1 0 0 5a2.5 2.5 0 1 0 0-5",
        memory: "M7 7h10v10H7zM10 3v4M14 3v4M10 17v4M14 17v4M3 10h4M3 14h4M17 10h4M17 14h4",
        close: "M6 6l12 12M18 6L6 18",
        reset_settings: "M5 12a7 7 0 1 0 2.5-5.4M5 4v4h4",
    };

    function draw(element) {
        const shape = SHAPES[element.textContent.trim()];
        if (shape) {
            element.innerHTML = `<svg class="icon" viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.8"
                stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><path d="${shape}"/></svg>`;
        }
    }

    const icons = "[class*=material-symbols]";
    new MutationObserver((changes) => {
        for (const change of changes) {
            for (const node of change.addedNodes) {
                if (node.nodeType === Node.ELEMENT_NODE) {
                    if (node.matches(icons)) draw(node);
                    node.querySelectorAll(icons).forEach(draw);
                }
            }
        }
    }).observe(document, { childList: true, subtree: true });
})();

// Tables of class "sortable": a click on a heading sorts by it, a second one the other way round.
"use strict";

function cellValue(row, column) {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
}

function sortBy(table, column, descending) {
    const rows = Array.from(table.tBodies[0].rows);
    const compare = (one, other) => {
        const [a, b] = [cellValue(one, column), cellValue(other, column)];
        if (typeof a === "number" && typeof b === "number") {
            return a - b;
        }
        return typeof a === typeof b ? a.localeCompare(b) : typeof a === "number" ? 1 : -1;
    };
    rows.sort((one, other) => (descending ? compare(other, one) : compare(one, other)));
    table.tBodies[0].append(...rows);
    Array.from(table.tHead.rows[0].cells).forEach((heading, position) => {
        heading.classList.toggle("ascending", position === column && !descending);
        heading.classList.toggle("descending", position === column && descending);
    });
}

document.querySelectorAll("table.sortable").forEach((table) => {
    Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
        heading.tabIndex = 0;
        const sort = () => {
            const numbers = heading.classList.contains("number");
            const again = heading.classList.contains("ascending") || heading.classList.contains("descending");
            sortBy(table, column, again ? heading.classList.contains("ascending") : numbers);
        };
        heading.addEventListener("click", sort);
        heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
});

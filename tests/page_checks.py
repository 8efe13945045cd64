"""Checks of a page that a browser shows: its width, and the contrast of its texts."""

from __future__ import annotations

from typing import Any

_STICKING_OUT = """() => {
  const wide = document.documentElement.clientWidth, found = [];
  const scrolled = document.documentElement.scrollWidth;
  if (scrolled > wide) found.push(`page: ${scrolled} > ${wide}`);
  for (const each of document.querySelectorAll("body *")) {
    const box = each.getBoundingClientRect();
    if (box.width && box.right > wide + 1 && !each.closest(".scroll") && !each.closest("[hidden]"))
      found.push(`${each.tagName} ${each.id || each.className}: ${Math.round(box.right)} > ${wide}`);
  }
  return found.slice(0, 10);
}"""

_BAD_CONTRASTS = """() => {
  const parts = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const ground = parts(getComputedStyle(at).backgroundColor);
      if (ground.length === 3 || ground[3] === 1) return ground;
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
  };
  const found = new Set();
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    const box = each.getBoundingClientRect();
    if (!own || !box.width || each.disabled) continue;
    if (["SCRIPT", "STYLE", "OPTION"].includes(each.tagName)) continue;
    const style = getComputedStyle(each), size = parseFloat(style.fontSize);
    const large = size >= 24 || size >= 18.66 && Number(style.fontWeight) >= 700;
    const [a, b] = [light(parts(style.color)), light(behind(each))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    const name = `${each.tagName} ${each.id || each.className}`;
    if (ratio < (large ? 3 : 4.5)) found.add(`${name}: ${ratio.toFixed(2)}`);
  }
  return [...found].slice(0, 10);
}"""


def sticking_out(tab: Any) -> list[str]:
    """Return the elements that reach beyond the right edge of a page, except inside parts that scroll."""
    found: list[str] = tab.evaluate(_STICKING_OUT)
    return found


def bad_contrasts(tab: Any) -> list[str]:
    """Return the texts whose contrast is below that of WCAG 2.2, level AA."""
    found: list[str] = tab.evaluate(_BAD_CONTRASTS)
    return found

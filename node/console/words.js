// Numbers as people read them.

export function nbytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export const nbytesPerS = (value) => `${nbytes(value)}/s`;

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${Math.round(value / 1e3)}k`;
  return value >= 10 || Number.isInteger(value) ? count(value) : value.toFixed(1);
}

export function percent(part, whole = 1) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return `${share > 99.9 || share === 0 ? share.toFixed(0) : share.toFixed(1)} %`;
}

export function ms(value) {
  for (const [unit, length] of [["d", 86400000], ["h", 3600000], ["min", 60000], ["s", 1000]]) {
    if (value >= length) return `${(value / length).toFixed(1)} ${unit}`;
  }
  return value >= 10 || value === 0 ? `${value.toFixed(0)} ms` : `${value.toFixed(2)} ms`;
}

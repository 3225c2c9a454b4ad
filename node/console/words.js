// Numbers and times as people read them.

export function nbytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${value < 10 && unit !== "B" ? trimmed(value, 1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return `${trimmed(value, 1)} TiB`;
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
  if (value >= 1e6) return `${trimmed(value / 1e6, 1)}M`;
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
    if (value >= length) return `${trimmed(value / length, 1)} ${unit}`;
  }
  return value >= 10 ? `${value.toFixed(0)} ms` : `${trimmed(value, 2)} ms`;
}

function trimmed(value, digits) {
  return String(Number(value.toFixed(digits)));
}

// The time of day, of 24 hours, wherever the reader is.
export function clock(unix, seconds = false) {
  const date = new Date(1000 * unix);
  const parts = [date.getHours(), date.getMinutes(), ...(seconds ? [date.getSeconds()] : [])];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

// The same with the day, if that is not today.
export function moment(unix) {
  const date = new Date(1000 * unix);
  const day = [date.getFullYear(), date.getMonth() + 1, date.getDate()].map((part) => String(part).padStart(2, "0")).join("-");
  return `${date.toDateString() === new Date().toDateString() ? "" : `${day} `}${clock(unix, true)}`;
}

// What is in a page: planes by the layout, values by their types, statistics and small pictures. The node sends bytes.

const NBYTES = {
  uint8: 1, int8: 1, float8_e4m3fn: 1, float8_e5m2: 1, float16: 2, bfloat16: 2, int16: 2, float32: 4, int32: 4,
  float64: 8, int64: 8,
};

// Every plane of every layer, in page order (kvstore/layout.py).
export function slices(layout) {
  const found = [];
  let offset = 0;
  for (const group of layout.groups) {
    for (const layer of group.layers) {
      for (const plane of group.planes) {
        const units = layout.page_tokens / plane.unit_tokens;
        const unitElements = plane.unit_shape.reduce((product, size) => product * size, 1);
        const unitNbytes = unitElements * NBYTES[plane.dtype];
        const { name, dtype } = plane;
        const shape = [units, ...plane.unit_shape];
        found.push({ group: group.name, layer, name, dtype, shape, units, unitElements, unitNbytes, offset, nbytes: units * unitNbytes });
        offset += units * unitNbytes;
      }
    }
  }
  return found;
}

// `data`: an ArrayBuffer of little-endian elements.
export function decode(dtype, data) {
  const view = new DataView(data);
  const count = data.byteLength / NBYTES[dtype];
  const each = (read) => Float64Array.from({ length: count }, (_, place) => read(place));
  switch (dtype) {
    case "uint8": return Float64Array.from(new Uint8Array(data));
    case "int8": return Float64Array.from(new Int8Array(data));
    case "int16": return each((place) => view.getInt16(2 * place, true));
    case "int32": return each((place) => view.getInt32(4 * place, true));
    case "int64": return each((place) => Number(view.getBigInt64(8 * place, true)));
    case "float32": return each((place) => view.getFloat32(4 * place, true));
    case "float64": return each((place) => view.getFloat64(8 * place, true));
    default: return coded(dtype, view, count);
  }
}

// Types of few values: each code is decoded once.
function coded(dtype, view, count) {
  const wide = NBYTES[dtype] === 2;
  const values = Float64Array.from({ length: wide ? 65536 : 256 }, (_, code) => CODES[dtype](code));
  const read = wide ? (place) => view.getUint16(2 * place, true) : (place) => view.getUint8(place);
  return Float64Array.from({ length: count }, (_, place) => values[read(place)]);
}

const scratch = new DataView(new ArrayBuffer(4));

function float16(code) {
  const exponent = (code >> 10) & 31;
  const fraction = code & 1023;
  const sign = code & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

const CODES = {
  float16,
  bfloat16(code) {
    scratch.setUint32(0, code * 65536);
    return scratch.getFloat32(0);
  },
  float8_e5m2: (code) => float16(code << 8),
  // No infinities; NaN is all ones.
  float8_e4m3fn(code) {
    const exponent = (code >> 3) & 15;
    const fraction = code & 7;
    if (exponent === 15 && fraction === 7) return NaN;
    const size = exponent ? (8 + fraction) * 2 ** (exponent - 10) : fraction * 2 ** -9;
    return code & 128 ? -size : size;
  },
};

export function statistics(values) {
  const told = { count: values.length, nan: 0, inf: 0, zero: 0, min: null, max: null, mean: null, std: null };
  let [finite, mean, squares, min, max] = [0, 0, 0, Infinity, -Infinity];
  for (const value of values) {
    if (Number.isNaN(value)) told.nan++;
    else if (!Number.isFinite(value)) told.inf++;
    else {
      if (value === 0) told.zero++;
      if (value < min) min = value;
      if (value > max) max = value;
      finite++;
      const away = value - mean;
      mean += away / finite;
      squares += away * (value - mean);
    }
  }
  return finite ? { ...told, min, max, mean, std: Math.sqrt(squares / finite) } : told;
}

// Units from above to below, elements of a unit from left to right, each point the mean of what lies there: blue below
// zero, red above, as strong as it is far from it; yellow where there is a NaN or an infinity.
export function drawHeat(canvas, values, units, unitElements, told) {
  const rows = Math.min(units, 96);
  const columns = Math.min(unitElements, 256);
  const sums = new Float64Array(rows * columns);
  const counts = new Float64Array(rows * columns);
  values.forEach((value, place) => {
    const row = Math.floor((Math.floor(place / unitElements) * rows) / units);
    const column = Math.floor(((place % unitElements) * columns) / unitElements);
    sums[row * columns + column] += value;
    counts[row * columns + column]++;
  });
  const far = 3 * told.std || Math.max(Math.abs(told.min), Math.abs(told.max)) || 1;
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  sums.forEach((sum, place) => {
    image.data.set(colour(sum / counts[place], far), 4 * place);
  });
  context.putImageData(image, 0, 0);
}

function colour(value, far) {
  if (!Number.isFinite(value)) return [240, 200, 0, 255];
  const strength = Math.min(1, Math.abs(value) / far);
  const [red, green, blue] = value < 0 ? [20, 90, 190] : [190, 40, 30];
  return [red, green, blue].map((part) => 255 + (part - 255) * strength).concat(255);
}

// How many values lie where between the least and the greatest.
export function drawCounts(canvas, values, told, ink) {
  const bins = new Float64Array(96);
  const room = told.max - told.min || 1;
  for (const value of values) {
    if (Number.isFinite(value)) bins[Math.min(95, Math.floor((96 * (value - told.min)) / room))]++;
  }
  canvas.width = 288;
  canvas.height = 40;
  const context = canvas.getContext("2d");
  const most = Math.max(...bins);
  context.fillStyle = ink;
  bins.forEach((count, place) => {
    const height = count ? Math.max(1, (38 * count) / most) : 0;
    context.fillRect(3 * place, 40 - height, 2.5, height);
  });
}

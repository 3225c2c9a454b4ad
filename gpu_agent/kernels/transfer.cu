// Gather (slots -> pages) and scatter (pages -> slots) for any pool and any page layout.
//
//   page   | plane slice 0 ........... | plane slice 1 ..... | ...      flat bytes, `PageLayout.slices`
//   tiles  |  0  |  1  |  2  |3|  4 ..                                  cut by plan.py: whole words of one slice
//   slice  := units x rows x words     a unit is what one index names, a row its contiguous bytes
//
// One warp moves one tile: all its loads are issued before its first store. Warps walk over (page,
// tile), so rows of 132 bytes fill them as well as rows of 2 KiB. What a row is, how far rows lie
// apart and how wide a word may be stands in the plane table; no layout is known here. Addresses are
// 64 bits wide; quotients stay below 2^31 words, which plan.py checks.
//
// The tables are int64 rows written by plan.py (PLANE_FIELDS, TILE_FIELDS): keep both in step.
// No header is included: the runtime compiler needs nothing but this file.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

#define OUTER_MAX 8

// n / value for 0 <= n < 2^31 as multiply and shift.
struct Divisor {
  i64 value, magic, shift;
};

// A dimension of a unit outside its rows, innermost first. `stride` in bytes.
struct Outer {
  Divisor size;
  i64 stride;
};

struct Plane {
  i64 base;          // address of slot 0
  i64 slot_stride;   // bytes
  i64 page_offset;   // of the slice in a page
  i64 word;          // bytes: 16, 8, 4, 2 or 1
  i64 slots_before;  // indices per page of the spaces in front of this one
  i64 units;         // per page
  i64 unit_tokens;
  Divisor row_words;
  Divisor unit_rows;
  i64 outer_count;
  Outer outer[OUTER_MAX];
};

// `words` words of a slice from word `column` of row `row` on; rows are counted through all units.
struct Tile {
  int plane, row, column, words;
};

__device__ inline u32 quotient(u32 n, const Divisor& divisor) {
  return (__umulhi(n, (u32)divisor.magic) + n) >> (u32)divisor.shift;
}

// Bytes from the start of a unit to row `row` of it.
__device__ inline i64 row_offset(const Plane& plane, u32 row) {
  i64 offset = 0;
#pragma unroll 1
  for (int i = 0; i < (int)plane.outer_count; i++) {
    const u32 next = quotient(row, plane.outer[i].size);
    offset += (i64)(row - next * (u32)plane.outer[i].size.value) * plane.outer[i].stride;
    row = next;
  }
  return offset;
}

// `page`: address of the page's byte 0. `slots`: the page's indices in the plane's space. Units below
// `unit_first` are left alone.
template <typename Word, int LOADS, bool GATHER>
__device__ inline void move_tile(const Plane& plane, const Tile& tile, i64 page, const i64* slots, i64 unit_first) {
  const int lane = threadIdx.x % 32;
  const i64 base = plane.base, slot_stride = plane.slot_stride;
  const Divisor row_words = plane.row_words;
  const bool strided = plane.outer_count != 0;
  const i64 flat = page + plane.page_offset + (tile.row * row_words.value + tile.column) * (i64)sizeof(Word);
  Word values[LOADS];
  i64 targets[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    // Threads behind the tile's end look at its last word and do not move it: the only branch is the
    // same for the whole warp.
    const int k = min(i * 32 + lane, tile.words - 1);
    const u32 rows = quotient((u32)(tile.column + k), row_words);
    const u32 column = (u32)(tile.column + k) - rows * (u32)row_words.value, row = (u32)tile.row + rows;
    u32 unit = row;
    i64 inside = (i64)column * (i64)sizeof(Word);
    if (strided) {
      unit = quotient(row, plane.unit_rows);
      inside += row_offset(plane, row - unit * (u32)plane.unit_rows.value);
    }
    const i64 slot = base + slots[unit] * slot_stride + inside;
    const i64 word = flat + (i64)k * (i64)sizeof(Word);
    const bool moves = i * 32 + lane < tile.words && (i64)unit >= unit_first;
    targets[i] = moves ? (GATHER ? word : slot) : 0;
    if (moves) values[i] = *(const Word*)(GATHER ? slot : word);
  }
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    if (targets[i]) *(Word*)targets[i] = values[i];
  }
}

// Pages `page_first .. page_first + page_count` of a job of `job_pages`, `tile_count` tiles of each.
// Page p lies at page_table[p] if there is a table, else at base + (p - page_first) * stride.
// `slots`: per space `[job_pages, indices per page]`. The first `skip_tokens` tokens of the job are
// left alone.
template <bool GATHER>
__device__ inline void move(const Plane* planes, const Tile* tiles, const i64* slots, const i64* page_table, i64 base,
                            i64 stride, i64 tile_count, i64 page_first, i64 page_count, i64 job_pages,
                            i64 skip_tokens) {
  const u32 warps = gridDim.x * (blockDim.x / 32), total = (u32)(tile_count * page_count);
  for (u32 item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; item < total; item += warps) {
    const u32 number = item / (u32)tile_count;
    const Tile tile = tiles[item - number * (u32)tile_count];
    const Plane& plane = planes[tile.plane];
    const i64 job_page = page_first + number;
    const i64 page = page_table ? page_table[job_page] : base + number * stride;
    const i64* indices = slots + plane.slots_before * job_pages + job_page * plane.units;
    const i64 unit_first = skip_tokens ? skip_tokens / plane.unit_tokens - job_page * plane.units : 0;
    switch (plane.word) {
      case 16: move_tile<uint4, 4, GATHER>(plane, tile, page, indices, unit_first); break;
      case 8: move_tile<u64, 4, GATHER>(plane, tile, page, indices, unit_first); break;
      case 4: move_tile<u32, 14, GATHER>(plane, tile, page, indices, unit_first); break;
      case 2: move_tile<unsigned short, 8, GATHER>(plane, tile, page, indices, unit_first); break;
      default: move_tile<unsigned char, 8, GATHER>(plane, tile, page, indices, unit_first); break;
    }
  }
}

#define KERNEL(name, is_gather)                                                                                     \
  extern "C" __global__ void __launch_bounds__(512)                                                                 \
      name(const Plane* __restrict__ planes, const Tile* __restrict__ tiles, const i64* __restrict__ slots,         \
           const i64* __restrict__ page_table, i64 base, i64 stride, i64 tile_count, i64 page_first, i64 page_count, \
           i64 job_pages, i64 skip_tokens) {                                                                        \
    move<is_gather>(planes, tiles, slots, page_table, base, stride, tile_count, page_first, page_count, job_pages,  \
                    skip_tokens);                                                                                   \
  }

KERNEL(gather, true)
KERNEL(scatter, false)

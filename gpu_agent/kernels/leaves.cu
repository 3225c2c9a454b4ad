// Leaves of pages' checksums: XXH3_64bits of each part of a page (docs/FORMAT.md, "Checksum"; xxHash 0.8's
// specification, for more than 240 bytes).
//
//   part    | block of 1 KiB | block | ...   | rest |      16 stripes of 64 bytes each, 8 words of 8 bytes
//   sums    every block by itself: added up over its stripes, in any order
//   chain   acc = scramble(acc + sums of block), block after block
//
// One thread block makes a leaf: warp 0 walks along the chain while the others add up the blocks in front of it, which
// are the loads. Pages begin at multiples of 8 and have a multiple of 8 bytes; staged.py sees to it.
//
// No header is included: the runtime compiler needs nothing but this file.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS 16
#define BLOCKS_EACH 4                          // 1 KiB blocks that a warp has in flight
#define TILE ((WARPS - 1) * BLOCKS_EACH)       // blocks between two barriers
#define BLOCK_WORDS 128

// XXH3's default secret, and words of it that begin inside a word.
__device__ const u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};
#define PRIME32_1 0x9E3779B1ull
#define PRIME64_1 0x9E3779B185EBCA87ull
__device__ const u64 START[8] = {0xC2B2AE3Dull,         PRIME64_1,     0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
                                 0x85EBCA77C2B2AE63ull, 0x85EBCA77ull, 0x27D4EB2F165667C5ull, PRIME32_1};

__device__ inline u64 secret_at(int byte) {
  const int word = byte / 8, bits = byte % 8 * 8;
  return bits ? SECRET[word] >> bits | SECRET[word + 1] << (64 - bits) : SECRET[word];
}

__device__ inline u64 shuffle_xor(u64 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

__device__ inline u64 product(u64 value, u64 key) {
  const u64 mixed = value ^ key;
  return (mixed & 0xffffffffull) * (mixed >> 32);
}

// What the stripes of all threads of a warp add to accumulator `lane % 8`. `products`, `raw`: of this thread's words.
__device__ inline u64 added(u64 products, u64 raw) {
  u64 sum = products + shuffle_xor(raw, 1);
  sum += shuffle_xor(sum, 8);
  return sum + shuffle_xor(sum, 16);
}

// Page p lies at table[p] if there is a table, else at base + (p - page_first) * stride. Its parts have `part_nbytes`,
// the last one what is left. The leaf of part i of page p goes to out[p * part_count + i], in host memory, big-endian.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    leaves(const i64* __restrict__ table, i64 base, i64 stride, i64 page_first, i64 page_count, i64 page_nbytes,
           i64 part_nbytes, i64 part_count, u64* __restrict__ out) {
  __shared__ u64 sums[2][TILE][8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 8, stripe = lane / 8;
  u64 keys[4];
#pragma unroll
  for (int j = 0; j < 4; j++) keys[j] = SECRET[4 * j + stripe + column];
  for (i64 item = blockIdx.x; item < page_count * part_count; item += gridDim.x) {
    const i64 number = item / part_count, part = item % part_count;
    const i64 page = table ? table[page_first + number] : base + number * stride;
    const u64* words = (const u64*)(page + part * part_nbytes);
    const i64 nbytes = part == part_count - 1 ? page_nbytes - part * part_nbytes : part_nbytes;
    const i64 blocks = (nbytes - 1) / 1024;
    u64 acc = START[column];
    for (i64 tile = 0, turn = 0; tile < blocks + TILE; tile += TILE, turn ^= 1) {
      if (warp && tile < blocks) {
        const int place = (warp - 1) * BLOCKS_EACH;
        u64 values[BLOCKS_EACH][4];
#pragma unroll
        for (int b = 0; b < BLOCKS_EACH; b++) {
          const i64 block = tile + place + b;
#pragma unroll
          for (int j = 0; j < 4; j++) values[b][j] = block < blocks ? words[block * BLOCK_WORDS + 32 * j + lane] : 0;
        }
#pragma unroll
        for (int b = 0; b < BLOCKS_EACH; b++) {
          u64 products = 0, raw = 0;
#pragma unroll
          for (int j = 0; j < 4; j++) products += product(values[b][j], keys[j]), raw += values[b][j];
          const u64 sum = added(products, raw);
          if (lane < 8) sums[turn][place + b][column] = sum;
        }
      } else if (!warp && tile) {
        const int count = (int)min((i64)TILE, blocks - (tile - TILE));
        const u64 key = SECRET[16 + column];
#pragma unroll 6
        for (int b = 0; b < count; b++) {
          acc += sums[turn ^ 1][b][column];
          acc = (acc ^ acc >> 47 ^ key) * PRIME32_1;
        }
      }
      __syncthreads();
    }
    if (warp) continue;  // all of it has been read: the next item's first tile may overwrite the sums
    const i64 rest = (nbytes - 1 - 1024 * blocks) / 64;
    u64 products = 0, raw = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (4 * j + stripe < rest) {
        const u64 value = words[blocks * BLOCK_WORDS + 32 * j + lane];
        products += product(value, keys[j]), raw += value;
      }
    }
    if (!stripe) {  // the last 64 bytes, whatever was added before
      const u64 value = words[nbytes / 8 - 8 + column];
      products += product(value, secret_at(121 + 8 * column)), raw += value;
    }
    acc += added(products, raw);
    const u64 mixed = acc ^ secret_at(11 + 8 * column), other = shuffle_xor(mixed, 1);
    u64 hash = column % 2 ? 0 : mixed * other ^ __umul64hi(mixed, other);
    hash += shuffle_xor(hash, 2);
    hash += shuffle_xor(hash, 4);
    hash += (u64)nbytes * PRIME64_1;
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ull;
    hash ^= hash >> 32;
    if (!lane) {
      const u32 high = __byte_perm((u32)hash, 0, 0x0123), low = __byte_perm((u32)(hash >> 32), 0, 0x0123);
      out[(page_first + number) * part_count + part] = (u64)high << 32 | low;
    }
  }
}

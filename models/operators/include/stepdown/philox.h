// The random words of dropout: Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011),
// for g++ (C++17) and nvcc (host and device).
//
//   key     = (low 32 bits of seed, high 32 bits of seed)
//   counter = (low 32 bits of block, high 32 bits of block << 8 | operator number, low and high 32 bits of offset)
//
// An element's word depends on its index in C order of the logical shape and on nothing else: block = index >> 2, word
// index & 3 of the four. Indices are below 2^58 and operator numbers below 2^8. The same function is written with NumPy
// in models/operators/philox.py.
#pragma once

#include <cmath>
#include <cstdint>

#if !defined(__CUDACC__) && defined(__SSE2__)
#include <immintrin.h>
#define STEPDOWN_PHILOX_LANES
#endif

#ifndef STEPDOWN_FUNCTION
#if defined(__CUDACC__)
#define STEPDOWN_FUNCTION __host__ __device__ __forceinline__
#else
#define STEPDOWN_FUNCTION inline __attribute__((always_inline))
#endif
#endif

namespace stepdown {

namespace detail {

struct PhiloxState {
    std::uint32_t word0, word1, word2, word3;
};

// High and low half of a 64-bit product. As two multiplications on the CPU, because g++ has good vector code for either
// and bad code for the widening one.
STEPDOWN_FUNCTION std::uint32_t multiply_high(std::uint32_t a, std::uint32_t b) {
    return static_cast<std::uint32_t>((std::uint64_t{a} * b) >> 32);
}

STEPDOWN_FUNCTION std::uint32_t multiply_low(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
    return static_cast<std::uint32_t>(std::uint64_t{a} * b);
#else
    return a * b;
#endif
}

// The given number of rounds. The keys depend on nothing but the seed: loops over blocks need not make them again.
template <int Rounds>
STEPDOWN_FUNCTION PhiloxState philox_rounds(PhiloxState state, std::uint32_t key0, std::uint32_t key1) {
    constexpr std::uint32_t multiplier0 = 0xD2511F53u;
    constexpr std::uint32_t multiplier1 = 0xCD9E8D57u;
    const PhiloxState next{
        multiply_high(state.word2, multiplier1) ^ state.word1 ^ key0,
        multiply_low(state.word2, multiplier1),
        multiply_high(state.word0, multiplier0) ^ state.word3 ^ key1,
        multiply_low(state.word0, multiplier0),
    };
    if constexpr (Rounds == 1) {
        return next;
    } else {
        return philox_rounds<Rounds - 1>(next, key0 + 0x9E3779B9u, key1 + 0xBB67AE85u);
    }
}

STEPDOWN_FUNCTION PhiloxState philox(
    std::int64_t seed, std::int64_t offset, std::uint32_t operator_number, std::uint64_t block) {
    const std::uint64_t seed_bits = static_cast<std::uint64_t>(seed);
    const std::uint64_t offset_bits = static_cast<std::uint64_t>(offset);
    const PhiloxState counter{
        static_cast<std::uint32_t>(block),
        static_cast<std::uint32_t>(block >> 32) << 8 | operator_number,
        static_cast<std::uint32_t>(offset_bits),
        static_cast<std::uint32_t>(offset_bits >> 32),
    };
    return philox_rounds<10>(
        counter, static_cast<std::uint32_t>(seed_bits), static_cast<std::uint32_t>(seed_bits >> 32));
}

}  // namespace detail

// The word of one element. Elements that differ only in the last two bits of their index share all but a selection:
// where a loop over them is unrolled, as `base | v` with a base that is a multiple of four, nvcc computes it once.
STEPDOWN_FUNCTION std::uint32_t philox_word(
    std::int64_t seed, std::int64_t offset, std::uint32_t operator_number, std::uint64_t index) {
    const detail::PhiloxState state = detail::philox(seed, offset, operator_number, index >> 2);
    const std::uint32_t selected = static_cast<std::uint32_t>(index) & 3u;
    const std::uint32_t low = (selected & 1u) != 0u ? state.word1 : state.word0;
    const std::uint32_t high = (selected & 1u) != 0u ? state.word3 : state.word2;
    return (selected & 2u) != 0u ? high : low;
}

// The words of elements 4 block, ..., 4 block + 3.
STEPDOWN_FUNCTION void philox_block(std::int64_t seed, std::int64_t offset, std::uint32_t operator_number,
                                    std::uint64_t block, std::uint32_t* words) {
    const detail::PhiloxState state = detail::philox(seed, offset, operator_number, block);
    words[0] = state.word0;
    words[1] = state.word1;
    words[2] = state.word2;
    words[3] = state.word3;
}

#if defined(STEPDOWN_PHILOX_LANES)
namespace detail {

// Consecutive blocks side by side, one to each 64-bit lane: a lane's low half is a word of the state, the high half is
// left over from products and read by nothing. One multiplication gives both halves of a product; g++ does not find it.
#if defined(__AVX2__)
struct Lanes {
    using Vector = __m256i;
    static constexpr int count = 4;
    static Vector all(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
    static Vector from(std::uint64_t x) { return add(all(x), _mm256_setr_epi64x(0, 1, 2, 3)); }
    static Vector add(Vector a, Vector b) { return _mm256_add_epi64(a, b); }
    static Vector multiply(Vector a, Vector b) { return _mm256_mul_epu32(a, b); }
    static Vector high(Vector a) { return _mm256_srli_epi64(a, 32); }
    static Vector exclusive_or(Vector a, Vector b) { return _mm256_xor_si256(a, b); }
    static Vector inclusive_or(Vector a, Vector b) { return _mm256_or_si256(a, b); }
    static Vector shift_left_8(Vector a) { return _mm256_slli_epi64(a, 8); }
    static Vector pair(Vector low, Vector high) { return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xAA); }
    static void store(Vector words01, Vector words23, std::uint32_t* words) {
        const Vector blocks02 = _mm256_unpacklo_epi64(words01, words23);
        const Vector blocks13 = _mm256_unpackhi_epi64(words01, words23);
        __m256i* to = reinterpret_cast<__m256i*>(words);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(blocks02, blocks13, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(blocks02, blocks13, 0x31));
    }
};
#else
struct Lanes {
    using Vector = __m128i;
    static constexpr int count = 2;
    static Vector all(std::uint64_t x) { return _mm_set1_epi64x(static_cast<long long>(x)); }
    static Vector from(std::uint64_t x) { return add(all(x), _mm_set_epi64x(1, 0)); }
    static Vector add(Vector a, Vector b) { return _mm_add_epi64(a, b); }
    static Vector multiply(Vector a, Vector b) { return _mm_mul_epu32(a, b); }
    static Vector high(Vector a) { return _mm_srli_epi64(a, 32); }
    static Vector exclusive_or(Vector a, Vector b) { return _mm_xor_si128(a, b); }
    static Vector inclusive_or(Vector a, Vector b) { return _mm_or_si128(a, b); }
    static Vector shift_left_8(Vector a) { return _mm_slli_epi64(a, 8); }
    static Vector pair(Vector low, Vector high) {
        return _mm_or_si128(_mm_and_si128(low, all(0xFFFFFFFFu)), _mm_slli_epi64(high, 32));
    }
    static void store(Vector words01, Vector words23, std::uint32_t* words) {
        __m128i* to = reinterpret_cast<__m128i*>(words);
        _mm_storeu_si128(to, _mm_unpacklo_epi64(words01, words23));
        _mm_storeu_si128(to + 1, _mm_unpackhi_epi64(words01, words23));
    }
};
#endif

// Two vectors of consecutive blocks from one on, taken through the rounds together to fill each other's waits.
struct LanesState {
    Lanes::Vector words[2][4];
};

template <int Rounds>
STEPDOWN_FUNCTION void philox_rounds(LanesState& state, std::uint32_t key0, std::uint32_t key1) {
    const Lanes::Vector multiplier0 = Lanes::all(0xD2511F53u);
    const Lanes::Vector multiplier1 = Lanes::all(0xCD9E8D57u);
    for (auto& words : state.words) {
        const Lanes::Vector product0 = Lanes::multiply(words[0], multiplier0);
        const Lanes::Vector product1 = Lanes::multiply(words[2], multiplier1);
        const Lanes::Vector word1 = Lanes::exclusive_or(words[1], Lanes::all(key0));
        const Lanes::Vector word3 = Lanes::exclusive_or(words[3], Lanes::all(key1));
        words[0] = Lanes::exclusive_or(Lanes::high(product1), word1);
        words[1] = product1;
        words[2] = Lanes::exclusive_or(Lanes::high(product0), word3);
        words[3] = product0;
    }
    if constexpr (Rounds > 1) {
        philox_rounds<Rounds - 1>(state, key0 + 0x9E3779B9u, key1 + 0xBB67AE85u);
    }
}

}  // namespace detail
#endif

// The words of `count` consecutive blocks: 4 count words, as philox_block gives them one block at a time. The fast way
// on a CPU; make it a row or a tile of a row, small enough for the first cache.
STEPDOWN_FUNCTION void philox_blocks(std::int64_t seed, std::int64_t offset, std::uint32_t operator_number,
                                     std::uint64_t first_block, std::int64_t count, std::uint32_t* words) {
    std::int64_t done = 0;
#if defined(STEPDOWN_PHILOX_LANES)
    using detail::Lanes;
    const std::uint64_t seed_bits = static_cast<std::uint64_t>(seed);
    const std::uint64_t offset_bits = static_cast<std::uint64_t>(offset);
    for (; done + 2 * Lanes::count <= count; done += 2 * Lanes::count) {
        detail::LanesState state;
        for (int half = 0; half < 2; ++half) {
            const std::uint64_t first = first_block + static_cast<std::uint64_t>(done + half * Lanes::count);
            const Lanes::Vector block = Lanes::from(first);
            state.words[half][0] = block;
            state.words[half][1] =
                Lanes::inclusive_or(Lanes::shift_left_8(Lanes::high(block)), Lanes::all(operator_number));
            state.words[half][2] = Lanes::all(offset_bits);
            state.words[half][3] = Lanes::all(offset_bits >> 32);
        }
        detail::philox_rounds<10>(
            state, static_cast<std::uint32_t>(seed_bits), static_cast<std::uint32_t>(seed_bits >> 32));
        for (int half = 0; half < 2; ++half) {
            const auto& result = state.words[half];
            Lanes::store(Lanes::pair(result[0], result[1]), Lanes::pair(result[2], result[3]),
                         words + 4 * (done + half * Lanes::count));
        }
    }
#endif
    for (; done < count; ++done) {
        philox_block(seed, offset, operator_number, first_block + static_cast<std::uint64_t>(done), words + 4 * done);
    }
}

// An element is kept where its word is at least this: min(round(p 2^32), 2^32 - 1), halves to even.
STEPDOWN_FUNCTION std::uint32_t dropout_threshold(double probability) {
    const double rounded = ::rint(probability * 4294967296.0);
    return rounded < 4294967295.0 ? static_cast<std::uint32_t>(rounded) : 4294967295u;
}

// What a kept value is multiplied by: 1 / (1 - p), rounded to T.
template <typename T>
STEPDOWN_FUNCTION T dropout_scale(double probability) {
    return static_cast<T>(1.0 / (1.0 - probability));
}

}  // namespace stepdown

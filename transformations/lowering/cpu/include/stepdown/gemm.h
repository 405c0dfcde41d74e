// Matrix products of generated CPU code: one BLAS call for one block of a result, on the calling thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cblas.h>
#include <omp.h>

// Size of the OpenMP team of generated code, for the calling thread. Weak: one copy in a library of many files.
extern "C" __attribute__((weak, used, visibility("default"))) void stepdown_set_num_threads(int threads) {
    omp_set_num_threads(std::max(threads, 1));
}

namespace stepdown {

inline void start_blas() { scipy_openblas_set_num_threads(1); }

// One of `count` nearly equal parts of an extent, a multiple of 16 elements except at the end; size <= 0: nothing left.
struct Block {
    std::int64_t begin;
    std::int64_t size;

    Block(std::int64_t extent, std::int64_t count, std::int64_t index) {
        const std::int64_t length = (extent + 16 * count - 1) / (16 * count) * 16;
        begin = index * length;
        size = std::min(length, extent - begin);
    }
};

inline void call_gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, float alpha, const float *a, int lda,
                      const float *b, int ldb, float beta, float *d, int ldd) {
    scipy_cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, d, ldd);
}

inline void call_gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, double alpha, const double *a,
                      int lda, const double *b, int ldb, double beta, double *d, int ldd) {
    scipy_cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, d, ldd);
}

// Results with at most this many rows or columns are summed in pieces of this many terms.
constexpr std::int64_t FEW = 16, PIECE = 32;

// d[m, n] = alpha * sum_k a[m, k] * b[k, n] + beta * d[m, n], all row-major, a and b transposed in memory where said.
// beta is 0 (d is not read) or 1.
template <typename T>
inline void gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, T alpha,
                 const T *a, std::int64_t lda, const T *b, std::int64_t ldb, T beta, T *d, std::int64_t ldd) {
    if (m <= 0 || n <= 0) return;
    if (k <= 0) {
        if (beta != T(0)) return;
        for (std::int64_t row = 0; row < m; ++row) std::fill(d + row * ldd, d + row * ldd + n, T(0));
        return;
    }
    // A matrix of one row or column may have any distance to the next: BLAS checks it all the same.
    const std::int64_t least_a = transpose_a ? m : k, least_b = transpose_b ? k : n;
    const std::int64_t row_a = std::max(lda, least_a), row_b = std::max(ldb, least_b);
    // Few rows or columns: other libraries spread such sums over many accumulators, and one after the other they would
    // lose some times as much. Pieces cost little here: the larger operand is read once whatever happens.
    const std::int64_t piece = std::min(m, n) <= FEW ? PIECE : k;
    for (std::int64_t begin = 0; begin < k; begin += piece) {
        call_gemm(transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans,
                  static_cast<int>(m), static_cast<int>(n), static_cast<int>(std::min(piece, k - begin)), alpha,
                  a + (transpose_a ? begin * row_a : begin), static_cast<int>(row_a),
                  b + (transpose_b ? begin : begin * row_b), static_cast<int>(row_b), begin == 0 ? beta : T(1), d,
                  static_cast<int>(std::max(ldd, n)));
    }
}

}  // namespace stepdown

// Continual normalization on a CPU: one pass over the data for statistics and one for the result, in both directions.
//
// The formulas are those of kernels/analytic.py and docs/concepts/one-pass.md. Notation: N samples, C channels in G
// groups of K, L positions; a row is one sample and channel, a slab one sample and group.
//
// Accuracy. The data is float32 or bfloat16, and so are the sums over blocks of it, in float32. All tables are float64:
// the mean and variance of a row are merged from blocks, in each of which the mean is subtracted before it is squared.
// Where the data itself is used again, it is minus `center`, the mean of its row rounded to float32. So nothing cancels
// at large means.
//
// Determinism. Each sum has a fixed order, which depends on the shape alone: LANES partial sums for contiguous rows, four
// positions at a time for channels_last. Threads divide rows or segments of samples, and never the terms of a sum. The
// flags of the compiler (library.py) must not allow it to reorder or contract floating-point operations.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

namespace {

using Index = std::int64_t;

#if defined(__AVX512F__)
constexpr int WIDTH = 16, STRIPS[] = {8, 4, 1};
#elif defined(__AVX__)
constexpr int WIDTH = 8, STRIPS[] = {4, 2, 1};
#else
constexpr int WIDTH = 4, STRIPS[] = {4, 2, 1};
#endif
constexpr int LANES = 32;         // partial sums of a contiguous row, whatever the width of a register
constexpr int VECTORS = LANES / WIDTH;
constexpr Index BLOCK = 2048;     // values of a contiguous row that are read twice, from the first-level cache
constexpr Index TILE = 256;       // positions of a channels_last tile, over which sums are in float32
constexpr Index HEAD = 16;        // positions of the first tile of a segment, which are read twice
constexpr Index MIN_TASKS = 64;   // segments of all samples, so that many threads have work

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef std::uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

// --- data types -------------------------------------------------------------------------------------------------

struct BFloat16 {
    std::uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline void store(float* at, float value) { *at = value; }

inline void store(BFloat16* at, float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    at->bits = static_cast<std::uint16_t>(value != value ? 0x7fc0u : rounded);
}

inline Vector load(const float* at) {
    Vector result;
    std::memcpy(&result, at, sizeof(result));
    return result;
}

inline Vector load(const BFloat16* at) {
    Halves halves;
    std::memcpy(&halves, at, sizeof(halves));
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Vector result;
    std::memcpy(&result, &words, sizeof(result));
    return result;
}

inline void store(float* at, Vector value) { std::memcpy(at, &value, sizeof(value)); }

inline void store(BFloat16* at, Vector value) {
    Words bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words result = value != value ? Words{} + 0x7fc0u : rounded;
    const Halves halves = __builtin_convertvector(result, Halves);
    std::memcpy(at, &halves, sizeof(halves));
}

// The first `count` values, and `fill` in the other lanes.
template <class T>
inline Vector load_part(const T* at, Index count, float fill) {
    if (count >= WIDTH) return load(at);
    float values[WIDTH];
    for (int j = 0; j < WIDTH; ++j) values[j] = fill;
    for (int j = 0; j < count; ++j) values[j] = to_float(at[j]);
    return load(values);
}

// --- sums of contiguous rows ------------------------------------------------------------------------------------

struct Sums {
    Vector lanes[VECTORS];

    Sums() {
        for (int v = 0; v < VECTORS; ++v) lanes[v] = Vector{};
    }

    double total() const {  // the same tree for every width
        float values[LANES];
        std::memcpy(values, lanes, sizeof(values));
        for (int half = LANES / 2; half > 0; half /= 2)
            for (int j = 0; j < half; ++j) values[j] += values[j + half];
        return values[0];
    }
};

// Call `add(lanes, position, count)` for all vectors of a block; the last one may be incomplete. The value at position i
// belongs to lane i modulo LANES, whatever the width of a register.
template <class Add>
inline void for_lanes(Index length, Add add) {
    Index i = 0;
    for (; i + LANES <= length; i += LANES)
        for (int v = 0; v < VECTORS; ++v) add(v, i + v * WIDTH, WIDTH);
    for (int v = 0; v < VECTORS; ++v)
        if (i + v * WIDTH < length) add(v, i + v * WIDTH, length - i - v * WIDTH);
}

struct Moments {
    double mean = 0, squares = 0;  // `squares` is the sum of squared differences from the mean
    double count = 0;

    void merge(double other_mean, double other_squares, double other_count) {
        const double total = count + other_count, step = other_mean - mean, part = other_count / total;
        mean += step * part;
        squares += other_squares + step * step * (count * part);
        count = total;
    }
};

inline double not_negative(double value) { return value < 0 ? 0 : value; }  // NaN stays NaN

template <class T>
inline void add_block(const T* x, Index length, Moments& moments) {
    const float first = to_float(x[0]);  // a value near the others, so that the terms of the first sum are small
    Sums sum;
    for_lanes(length, [&](int v, Index i, Index count) { sum.lanes[v] += load_part(x + i, count, first) - first; });
    const float center = static_cast<float>(first + sum.total() / length);
    Sums difference, square;
    for_lanes(length, [&](int v, Index i, Index count) {
        const Vector d = load_part(x + i, count, center) - center;
        difference.lanes[v] += d;
        square.lanes[v] += d * d;
    });
    const double off = difference.total() / length;
    moments.merge(center + off, not_negative(square.total() - off * off * length), static_cast<double>(length));
}

// --- sizes, tables, pointers ------------------------------------------------------------------------------------

struct Sizes {
    Index n, c, length, groups;
    bool channels_last;

    Index per_group() const { return c / groups; }
    // channels_last: segments of positions of a sample, which depend on the shape alone
    Index segments() const { return std::min((MIN_TASKS + n - 1) / n, (length + TILE - 1) / TILE); }
    Index segment_begin(Index i) const { return length * i / segments(); }
    int team(int threads) const {  // starting a thread costs more than a few thousand values
        return static_cast<int>(std::max<Index>(1, std::min<Index>(threads, n * c * length / 16384)));
    }
};

struct Tables {  // of float64, kept for the backward pass
    double *mean, *var;               // (N, C): of each row
    double *group_mean, *group_rstd;  // (N, G)
    double *batch_mean, *batch_rstd;  // (C,): of the group-normalized signal

    Tables(double* memory, const Sizes& s) {
        mean = memory, var = mean + s.n * s.c;
        group_mean = var + s.n * s.c, group_rstd = group_mean + s.n * s.groups;
        batch_mean = group_rstd + s.n * s.groups, batch_rstd = batch_mean + s.c;
    }
};

struct Running {  // moments that the moments of the batch update, unless they are null
    float *mean, *var;
    double momentum;

    void update(Index c, double batch_mean, double batch_var, double count) const {
        if (!mean) return;
        const double unbiased = count > 1 ? batch_var * (count / (count - 1)) : batch_var;
        mean[c] = static_cast<float>(mean[c] + momentum * (batch_mean - mean[c]));
        var[c] = static_cast<float>(var[c] + momentum * (unbiased - var[c]));
    }
};

struct Affine {
    const float *weight, *bias;

    double scale(Index c) const { return weight ? weight[c] : 1.0; }
    double offset(Index c) const { return bias ? bias[c] : 0.0; }
};

struct Line {  // y = slope * (x - center) + offset
    float center, slope, offset;

    float at(float x) const { return slope * (x - center) + offset; }
};

inline Line line_of(const Tables& t, const Affine& affine, const Sizes& s, Index n, Index g, Index c) {
    const Index slab = n * s.groups + g;
    const float center = static_cast<float>(t.mean[n * s.c + c]);
    const double gain = t.batch_rstd[c] * affine.scale(c), r = t.group_rstd[slab];
    const double level = (center - t.group_mean[slab]) * r - t.batch_mean[c];
    return {center, static_cast<float>(r * gain), static_cast<float>(level * gain + affine.offset(c))};
}

// The lines of all channels of a sample, as three arrays: centers, slopes, offsets.
inline void lines_of(const Tables& t, const Affine& affine, const Sizes& s, Index n, float* result) {
    const Index k = s.per_group();
    for (Index g = 0; g < s.groups; ++g)
        for (Index c = g * k; c < (g + 1) * k; ++c) {
            const Line line = line_of(t, affine, s, n, g, c);
            result[c] = line.center, result[s.c + c] = line.slope, result[2 * s.c + c] = line.offset;
        }
}

struct Range {
    Index begin, end;
};

inline Range share(Index tasks) {  // of this thread
    const Index team = omp_get_num_threads(), me = omp_get_thread_num();
    return {tasks * me / team, tasks * (me + 1) / team};
}

// --- tables -----------------------------------------------------------------------------------------------------

void group_tables(const Tables& t, const Sizes& s, double eps, Index n, Index g) {
    const Index k = s.per_group(), first = n * s.c + g * k;
    double mean = 0, power = 0;
    for (Index j = 0; j < k; ++j) mean += t.mean[first + j];
    mean /= k;
    for (Index j = 0; j < k; ++j) {
        const double off = t.mean[first + j] - mean;
        power += t.var[first + j] + off * off;
    }
    t.group_mean[n * s.groups + g] = mean;
    t.group_rstd[n * s.groups + g] = 1.0 / std::sqrt(power / k + eps);
}

// The mean of the variances plus the variance of the means, for all channels of some groups.
void batch_tables(const Tables& t, const Sizes& s, double eps, float* moments, const Running& running, Range groups) {
    const Index k = s.per_group(), begin = groups.begin * k, end = groups.end * k;
    double *mean = t.batch_mean, *var = t.batch_rstd;
    std::fill(mean + begin, mean + end, 0.0), std::fill(var + begin, var + end, 0.0);
    for (Index n = 0; n < s.n; ++n)
        for (Index g = groups.begin; g < groups.end; ++g) {
            const double u = t.group_mean[n * s.groups + g], r = t.group_rstd[n * s.groups + g];
            for (Index c = g * k; c < (g + 1) * k; ++c) mean[c] += (t.mean[n * s.c + c] - u) * r;
        }
    for (Index c = begin; c < end; ++c) mean[c] /= s.n;
    for (Index n = 0; n < s.n; ++n)
        for (Index g = groups.begin; g < groups.end; ++g) {
            const double u = t.group_mean[n * s.groups + g], r = t.group_rstd[n * s.groups + g];
            for (Index c = g * k; c < (g + 1) * k; ++c) {
                const double off = (t.mean[n * s.c + c] - u) * r - mean[c];
                var[c] += t.var[n * s.c + c] * (r * r) + off * off;
            }
        }
    for (Index c = begin; c < end; ++c) {
        const double v = var[c] / s.n;
        moments[c] = static_cast<float>(mean[c]);
        moments[s.c + c] = static_cast<float>(v);
        running.update(c, mean[c], v, static_cast<double>(s.n) * static_cast<double>(s.length));
        t.batch_rstd[c] = 1.0 / std::sqrt(v + eps);
    }
}

void given_tables(const Tables& t, const Sizes& s, double eps, const float* mean, const float* var) {
    for (Index c = 0; c < s.c; ++c) {
        t.batch_mean[c] = mean[c];
        t.batch_rstd[c] = 1.0 / std::sqrt(static_cast<double>(var[c]) + eps);
    }
}

// --- statistics -------------------------------------------------------------------------------------------------

template <class T>
void row_moments(const T* x, const Tables& t, const Sizes& s, Index row) {
    Moments moments;
    for (Index i = 0; i < s.length; i += BLOCK)
        add_block(x + row * s.length + i, std::min(BLOCK, s.length - i), moments);
    t.mean[row] = moments.mean;
    t.var[row] = moments.squares / s.length;
}

// Call `visit(first, count)` for runs of positions whose values stay in the first-level cache while their strips of
// channels are visited one after the other. Each run but the last is a multiple of four, so sums are the same as without.
template <class Visit>
inline void for_runs(Index positions, Index channels, Visit visit) {
    const Index most = std::max<Index>(4, 4096 / channels / 4 * 4);
    for (Index i = 0; i < positions; i += most) visit(i, std::min(most, positions - i));
}

// Call `visit(number of vectors, first channel)` for strips of channels whose tables fit into registers, widest first,
// and return the first channel of the rest, which is less than a vector. The widest strips are used where they make a
// position one strip, so that memory is read in order; otherwise they are slower than the next ones (measured).
template <class Visit>
inline Index for_strips(Index channels, Visit visit) {
    Index c = 0;
    if (channels >= STRIPS[0] * WIDTH && channels < (STRIPS[0] + STRIPS[1]) * WIDTH) {
        visit(std::integral_constant<int, STRIPS[0]>(), c);
        c += STRIPS[0] * WIDTH;
    }
    for (; c + STRIPS[1] * WIDTH <= channels; c += STRIPS[1] * WIDTH)
        visit(std::integral_constant<int, STRIPS[1]>(), c);
    for (; c + WIDTH <= channels; c += WIDTH) visit(std::integral_constant<int, 1>(), c);
    return c;
}

// Tables of a strip of channels, in registers.
template <int SIZE>
struct Strip {
    Vector part[SIZE];

    explicit Strip(const float* at) {
        for (int v = 0; v < SIZE; ++v) part[v] = load(at + v * WIDTH);
    }

    void store_to(float* at) const {
        for (int v = 0; v < SIZE; ++v) store(at + v * WIDTH, part[v]);
    }
};

// Add the differences from `center` over some positions to `sum`, and their squares to `square` unless it is null.
template <bool SQUARES, class T>
void add_positions(const T* x, Index positions, Index channels, const float* center, float* sum, float* square) {
    Index c = for_strips(channels, [&](auto size, Index c) {
        constexpr int SIZE = decltype(size)::value;
        const Strip<SIZE> middle(center + c);
        Strip<SIZE> one(sum + c), two(SQUARES ? square + c : sum + c);
        const T* at = x + c;
        Index i = 0;
        for (; i + 4 <= positions; i += 4, at += 4 * channels)
            for (int v = 0; v < SIZE; ++v) {
                const T* p = at + v * WIDTH;
                const Vector a = load(p) - middle.part[v], b = load(p + channels) - middle.part[v];
                const Vector d = load(p + 2 * channels) - middle.part[v], e = load(p + 3 * channels) - middle.part[v];
                one.part[v] += (a + b) + (d + e);
                if (SQUARES) two.part[v] += (a * a + b * b) + (d * d + e * e);
            }
        for (; i < positions; ++i, at += channels)
            for (int v = 0; v < SIZE; ++v) {
                const Vector d = load(at + v * WIDTH) - middle.part[v];
                one.part[v] += d;
                if (SQUARES) two.part[v] += d * d;
            }
        one.store_to(sum + c);
        if (SQUARES) two.store_to(square + c);
    });
    for (; c < channels; ++c) {  // the same for the last channels, one by one
        float one = sum[c], two = SQUARES ? square[c] : 0;
        const T* at = x + c;
        const auto difference = [&](Index position) { return to_float(at[position * channels]) - center[c]; };
        Index i = 0;
        for (; i + 4 <= positions; i += 4) {
            const float a = difference(i), b = difference(i + 1), d = difference(i + 2), e = difference(i + 3);
            one += (a + b) + (d + e);
            if (SQUARES) two += (a * a + b * b) + (d * d + e * e);
        }
        for (; i < positions; ++i) {
            const float d = difference(i);
            one += d;
            if (SQUARES) two += d * d;
        }
        sum[c] = one;
        if (SQUARES) square[c] = two;
    }
}

// Moments of all channels over a segment of positions of a sample: means, then sums of squares, 2 C values.
//
// The center of a tile is the mean of the positions before it. If that is far from the mean of the tile, then the
// variance of the row is large too, and the error is small in comparison. The first tile has no positions before it: it
// is read twice.
template <class T>
void segment_moments(const T* x, const Sizes& s, Index n, Index segment, float* buffer, double* result) {
    const Index channels = s.c, stop = s.segment_begin(segment + 1);
    float *__restrict center = buffer, *__restrict sum = center + channels, *__restrict square = sum + channels;
    double *__restrict mean = result, *__restrict squares = mean + channels;
    std::fill(result, result + 2 * channels, 0.0);
    Index count = 0, size;
    for (Index begin = s.segment_begin(segment); begin < stop; begin += size, count += size) {
        size = std::min(count ? TILE : HEAD, stop - begin);
        const T* tile = x + (n * s.length + begin) * channels;
        if (count) {
            for (Index c = 0; c < channels; ++c) center[c] = static_cast<float>(mean[c]);
        } else {
            for (Index c = 0; c < channels; ++c) center[c] = to_float(tile[c]), sum[c] = 0;
            add_positions<false>(tile, size, channels, center, sum, static_cast<float*>(nullptr));
            for (Index c = 0; c < channels; ++c) center[c] += sum[c] * (1.0f / static_cast<float>(size));
        }
        for (Index c = 0; c < channels; ++c) sum[c] = square[c] = 0;
        for_runs(size, channels, [&](Index i, Index run) {
            add_positions<true>(tile + i * channels, run, channels, center, sum, square);
        });
        const double part = static_cast<double>(size) / static_cast<double>(count + size), weight = count * part;
        const double inverse = 1.0 / static_cast<double>(size);
        for (Index c = 0; c < channels; ++c) {
            const double off = sum[c] * inverse, step = center[c] + off - mean[c];
            mean[c] += step * part;
            squares[c] += not_negative(square[c] - off * off * size) + step * step * weight;
        }
    }
}

// Merge the moments of the segments of a sample.
void merge_segments(const double* segments, const Tables& t, const Sizes& s, Index n) {
    double *mean = t.mean + n * s.c, *var = t.var + n * s.c;
    std::fill(mean, mean + s.c, 0.0), std::fill(var, var + s.c, 0.0);
    double count = 0;
    for (Index i = 0; i < s.segments(); ++i) {
        const double size = static_cast<double>(s.segment_begin(i + 1) - s.segment_begin(i));
        const double total = count + size, part = size / total, weight = count * part;
        const double* other = segments + (n * s.segments() + i) * 2 * s.c;
        for (Index c = 0; c < s.c; ++c) {
            const double step = other[c] - mean[c];
            mean[c] += step * part;
            var[c] += other[s.c + c] + step * step * weight;
        }
        count = total;
    }
    for (Index c = 0; c < s.c; ++c) var[c] /= count;
}

// --- output -----------------------------------------------------------------------------------------------------

inline float relu_of(float value) { return value < 0 ? 0.0f : value; }  // NaN stays NaN

template <bool RESIDUAL, bool RELU, class T>
void write_line(const T* __restrict x, const T* __restrict residual, T* __restrict y, Index length, Line line) {
    for (Index i = 0; i < length; ++i) {
        float value = line.at(to_float(x[i]));
        if (RESIDUAL) value += to_float(residual[i]);
        store(y + i, RELU ? relu_of(value) : value);
    }
}

inline Vector relu_of(Vector value) { return value < 0.0f ? Vector{} : value; }

template <bool RESIDUAL, bool RELU, class T>
void write_positions(const T* __restrict x, const T* __restrict residual, T* __restrict y, Index positions,
                     Index channels, const float* __restrict lines) {
    const float *center = lines, *slope = center + channels, *offset = slope + channels;
    Index c = for_strips(channels, [&](auto size, Index c) {
        constexpr int SIZE = decltype(size)::value;
        const Strip<SIZE> middle(center + c), factor(slope + c), rest(offset + c);
        for (Index i = 0; i < positions; ++i)
            for (int v = 0; v < SIZE; ++v) {
                const Index at = i * channels + c + v * WIDTH;
                Vector value = factor.part[v] * (load(x + at) - middle.part[v]) + rest.part[v];
                if (RESIDUAL) value += load(residual + at);
                store(y + at, RELU ? relu_of(value) : value);
            }
    });
    if (c == channels) return;
    for (Index i = 0; i < positions; ++i)
        for (Index j = c; j < channels; ++j) {
            const Index at = i * channels + j;
            float value = slope[j] * (to_float(x[at]) - center[j]) + offset[j];
            if (RESIDUAL) value += to_float(residual[at]);
            store(y + at, RELU ? relu_of(value) : value);
        }
}

template <class T>
struct Output {
    const T *x, *residual;
    T* y;
    bool relu;

    void row(const Tables& t, const Affine& affine, const Sizes& s, Index n, Index g, Index c) const {
        const Index at = (n * s.c + c) * s.length;
        const Line line = line_of(t, affine, s, n, g, c);
        const T* other = residual ? residual + at : nullptr;
        if (residual && relu) return write_line<true, true>(x + at, other, y + at, s.length, line);
        if (residual) return write_line<true, false>(x + at, other, y + at, s.length, line);
        if (relu) return write_line<false, true>(x + at, other, y + at, s.length, line);
        write_line<false, false>(x + at, other, y + at, s.length, line);
    }

    void segment(const Tables& t, const Affine& affine, const Sizes& s, Index n, Index i, float* buffer) const {
        lines_of(t, affine, s, n, buffer);
        const Index begin = s.segment_begin(i), size = s.segment_begin(i + 1) - begin;
        const Index at = (n * s.length + begin) * s.c;
        for_runs(size, s.c, [&](Index first, Index run) {
            const Index from = at + first * s.c;
            const T* other = residual ? residual + from : nullptr;
            if (residual && relu) return write_positions<true, true>(x + from, other, y + from, run, s.c, buffer);
            if (residual) return write_positions<true, false>(x + from, other, y + from, run, s.c, buffer);
            if (relu) return write_positions<false, true>(x + from, other, y + from, run, s.c, buffer);
            write_positions<false, false>(x + from, other, y + from, run, s.c, buffer);
        });
    }
};

// --- forward ----------------------------------------------------------------------------------------------------

template <class T>
void train_rows(const Output<T>& out, const Tables& t, const Affine& affine, const Sizes& s, double eps, float* moments,
                const Running& running, int threads) {
#pragma omp parallel num_threads(s.team(threads))
    {
        const Range slabs = share(s.n * s.groups);
        const Index k = s.per_group();
        for (Index row = slabs.begin * k; row < slabs.end * k; ++row) row_moments(out.x, t, s, row);
        for (Index i = slabs.begin; i < slabs.end; ++i) group_tables(t, s, eps, i / s.groups, i % s.groups);
#pragma omp barrier
        batch_tables(t, s, eps, moments, running, share(s.groups));
#pragma omp barrier
        // In reverse, because the rows that were read last are still in the cache.
        for (Index i = slabs.end - 1; i >= slabs.begin; --i) {
            const Index n = i / s.groups, g = i % s.groups;
            for (Index c = (g + 1) * k - 1; c >= g * k; --c) out.row(t, affine, s, n, g, c);
        }
    }
}

template <class T>
void train_segments(const Output<T>& out, const Tables& t, const Affine& affine, const Sizes& s, double eps,
                    float* moments, const Running& running, int threads, float* buffers, double* partial) {
#pragma omp parallel num_threads(s.team(threads))
    {
        const Index count = s.segments();
        const Range segments = share(s.n * count), samples = share(s.n);
        float* buffer = buffers + omp_get_thread_num() * 3 * s.c;
        for (Index i = segments.begin; i < segments.end; ++i)
            segment_moments(out.x, s, i / count, i % count, buffer, partial + i * 2 * s.c);
#pragma omp barrier
        for (Index n = samples.begin; n < samples.end; ++n) {
            merge_segments(partial, t, s, n);
            for (Index g = 0; g < s.groups; ++g) group_tables(t, s, eps, n, g);
        }
#pragma omp barrier
        batch_tables(t, s, eps, moments, running, share(s.groups));
#pragma omp barrier
        for (Index i = segments.end - 1; i >= segments.begin; --i)
            out.segment(t, affine, s, i / count, i % count, buffer);
    }
}

template <class T>
int train(const void* x, const float* weight, const float* bias, const void* residual, void* y, double* table,
          float* moments, const Running& running, const Sizes& s, double eps, bool relu, int threads) {
    const Output<T> out{static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<T*>(y), relu};
    const Tables t(table, s);
    const Affine affine{weight, bias};
    if (!s.channels_last) {
        train_rows(out, t, affine, s, eps, moments, running, threads);
        return 0;
    }
    const std::unique_ptr<float[]> buffers(new (std::nothrow) float[s.team(threads) * 3 * s.c]);
    const std::unique_ptr<double[]> partial(new (std::nothrow) double[s.n * s.segments() * 2 * s.c]);
    if (!buffers || !partial) return 1;
    train_segments(out, t, affine, s, eps, moments, running, threads, buffers.get(), partial.get());
    return 0;
}

// With given moments each slab stands alone: it is written while it is still in the cache.
template <class T>
int evaluate(const T* x, const float* mean, const float* var, const float* weight, const float* bias, const T* residual,
             T* y, const Sizes& s, double eps, bool relu, int threads) {
    const Index size = 2 * s.n * (s.c + s.groups) + 2 * s.c;
    const std::unique_ptr<double[]> table(new (std::nothrow) double[size]);
    const int team = s.team(threads);
    const std::unique_ptr<float[]> buffers(new (std::nothrow) float[team * 3 * s.c]);
    const Index count = s.segments(), k = s.per_group();
    const std::unique_ptr<double[]> partial(new (std::nothrow) double[s.channels_last ? s.n * count * 2 * s.c : 1]);
    if (!table || !buffers || !partial) return 1;
    const Output<T> out{x, residual, y, relu};
    const Tables t(table.get(), s);
    const Affine affine{weight, bias};
    given_tables(t, s, eps, mean, var);
#pragma omp parallel num_threads(team)
    {
        float* buffer = buffers.get() + omp_get_thread_num() * 3 * s.c;
        double* const moments = partial.get();
        if (!s.channels_last) {
            const Range slabs = share(s.n * s.groups);
            for (Index i = slabs.begin; i < slabs.end; ++i) {
                for (Index row = i * k; row < (i + 1) * k; ++row) row_moments(x, t, s, row);
                group_tables(t, s, eps, i / s.groups, i % s.groups);
                const Index n = i / s.groups, g = i % s.groups;
                for (Index c = (g + 1) * k - 1; c >= g * k; --c) out.row(t, affine, s, n, g, c);
            }
        } else {
            // A team larger than the batch shares the segments of each sample; the sums are the same.
            const bool alone = s.n >= omp_get_num_threads();
            const Range samples = alone ? share(s.n) : Range{0, s.n}, parts = alone ? Range{0, count} : share(count);
            for (Index n = samples.begin; n < samples.end; ++n) {
                for (Index i = parts.begin; i < parts.end; ++i)
                    segment_moments(x, s, n, i, buffer, moments + (n * count + i) * 2 * s.c);
                if (!alone) {
#pragma omp barrier
                }
                if (alone || omp_get_thread_num() == 0) {
                    merge_segments(moments, t, s, n);
                    for (Index g = 0; g < s.groups; ++g) group_tables(t, s, eps, n, g);
                }
                if (!alone) {
#pragma omp barrier
                }
                for (Index i = parts.end - 1; i >= parts.begin; --i) out.segment(t, affine, s, n, i, buffer);
            }
        }
    }
    return 0;
}

// --- backward ---------------------------------------------------------------------------------------------------

template <class T>
struct Input {  // of the backward pass; `y` is the output if ReLU follows a residual
    const T *x, *dy, *y;
    T *dx, *dresidual;
    bool relu;
};

// The gradient before ReLU. Without a saved output, its sign is computed again, as in the forward pass.
template <int RELU>  // 0: none, 1: by the saved output, 2: by the output computed again
inline float masked(float dy, float saved, float value) {
    if (RELU == 1) return saved <= 0 ? 0.0f : dy;
    if (RELU == 2) return value <= 0 ? 0.0f : dy;
    return dy;
}

template <int RELU>
inline Vector masked(Vector dy, Vector saved, Vector value) {
    if (RELU == 0) return dy;
    const auto off = (RELU == 1 ? saved : value) <= 0.0f;
    return off ? Vector{} : dy;
}

struct RowSums {  // (N, C) each: sums over positions of dy, and of dy * (x - center)
    double *dy, *dyx;
};

template <int RELU, class T>
void row_sums(const Input<T>& in, Index at, Index length, Line line, double& sum_dy, double& sum_dyx) {
    sum_dy = sum_dyx = 0;
    for (Index begin = 0; begin < length; begin += BLOCK) {
        const T *x = in.x + at + begin, *dy = in.dy + at + begin, *y = RELU == 1 ? in.y + at + begin : in.x;
        Sums one, two;
        for_lanes(std::min(BLOCK, length - begin), [&](int v, Index i, Index count) {
            const Vector d = load_part(x + i, count, line.center) - line.center;
            const Vector saved = RELU == 1 ? load_part(y + i, count, 0) : d;
            const Vector g = masked<RELU>(load_part(dy + i, count, 0), saved, line.slope * d + line.offset);
            one.lanes[v] += g;
            two.lanes[v] += g * d;
        });
        sum_dy += one.total();
        sum_dyx += two.total();
    }
}

// Add dy, and dy times the difference of x from its center, over some positions to `one` and `two`.
template <int RELU, class T>
void add_gradients(const T* x, const T* dy, const T* y, Index positions, Index channels, const float* center,
                   const float* slope, const float* offset, float* one, float* two) {
    Index c = for_strips(channels, [&](auto size, Index c) {
        constexpr int SIZE = decltype(size)::value;
        const Strip<SIZE> middle(center + c), factor(slope + c), rest(offset + c);
        Strip<SIZE> first(one + c), second(two + c);
        const auto gradient = [&](Index at, Vector d, int v) {
            const Vector saved = RELU == 1 ? load(y + at) : d;
            return masked<RELU>(load(dy + at), saved, factor.part[v] * d + rest.part[v]);
        };
        Index i = 0;
        for (; i + 2 <= positions; i += 2)
            for (int v = 0; v < SIZE; ++v) {
                const Index at = i * channels + c + v * WIDTH, next = at + channels;
                const Vector d = load(x + at) - middle.part[v], e = load(x + next) - middle.part[v];
                const Vector g = gradient(at, d, v), h = gradient(next, e, v);
                first.part[v] += g + h;
                second.part[v] += g * d + h * e;
            }
        for (; i < positions; ++i)
            for (int v = 0; v < SIZE; ++v) {
                const Index at = i * channels + c + v * WIDTH;
                const Vector d = load(x + at) - middle.part[v], g = gradient(at, d, v);
                first.part[v] += g;
                second.part[v] += g * d;
            }
        first.store_to(one + c), second.store_to(two + c);
    });
    for (; c < channels; ++c) {
        const auto gradient = [&](Index at, float d) {
            const float saved = RELU == 1 ? to_float(y[at]) : 0.0f;
            return masked<RELU>(to_float(dy[at]), saved, slope[c] * d + offset[c]);
        };
        Index i = 0;
        for (; i + 2 <= positions; i += 2) {
            const Index at = i * channels + c, next = at + channels;
            const float d = to_float(x[at]) - center[c], e = to_float(x[next]) - center[c];
            const float g = gradient(at, d), h = gradient(next, e);
            one[c] += g + h;
            two[c] += g * d + h * e;
        }
        for (; i < positions; ++i) {
            const float d = to_float(x[i * channels + c]) - center[c], g = gradient(i * channels + c, d);
            one[c] += g;
            two[c] += g * d;
        }
    }
}

// The same for all positions of a segment, in float64: 2 C values.
template <int RELU, class T>
void segment_sums(const Input<T>& in, const Sizes& s, Index n, Index segment, const float* lines, float* buffer,
                  double* result) {
    const Index channels = s.c, stop = s.segment_begin(segment + 1);
    std::fill(result, result + 2 * channels, 0.0);
    for (Index begin = s.segment_begin(segment); begin < stop; begin += TILE) {
        const Index at = (n * s.length + begin) * channels;
        std::fill(buffer, buffer + 2 * channels, 0.0f);
        for_runs(std::min(TILE, stop - begin), channels, [&](Index first, Index run) {
            const Index from = at + first * channels;
            add_gradients<RELU>(in.x + from, in.dy + from, (RELU == 1 ? in.y : in.x) + from, run, channels, lines,
                                lines + channels, lines + 2 * channels, buffer, buffer + channels);
        });
        for (Index c = 0; c < 2 * channels; ++c) result[c] += buffer[c];
    }
}

void add_segments(const double* segments, const RowSums& sums, const Sizes& s, Index n) {
    double *dy = sums.dy + n * s.c, *dyx = sums.dyx + n * s.c;
    std::fill(dy, dy + s.c, 0.0), std::fill(dyx, dyx + s.c, 0.0);
    for (Index i = 0; i < s.segments(); ++i) {
        const double* other = segments + (n * s.segments() + i) * 2 * s.c;
        for (Index c = 0; c < s.c; ++c) dy[c] += other[c], dyx[c] += other[s.c + c];
    }
}

struct BatchSums {  // (C,) each: gradients of bias and weight
    double *bias, *weight;
};

// Sums over samples for all channels of some groups. The second sum of each row becomes that of dy times the
// group-normalized signal.
void batch_sums(const Tables& t, const RowSums& sums, const BatchSums& batch, const Sizes& s, float* dweight,
                float* dbias, Range groups) {
    const Index k = s.per_group(), begin = groups.begin * k, end = groups.end * k;
    std::fill(batch.bias + begin, batch.bias + end, 0.0), std::fill(batch.weight + begin, batch.weight + end, 0.0);
    for (Index n = 0; n < s.n; ++n)
        for (Index g = groups.begin; g < groups.end; ++g) {
            const double u = t.group_mean[n * s.groups + g], r = t.group_rstd[n * s.groups + g];
            for (Index c = g * k; c < (g + 1) * k; ++c) {
                const Index row = n * s.c + c;
                const double center = static_cast<float>(t.mean[row]);
                sums.dyx[row] = (sums.dyx[row] + (center - u) * sums.dy[row]) * r;
                batch.bias[c] += sums.dy[row];
                batch.weight[c] += sums.dyx[row];
            }
        }
    for (Index c = begin; c < end; ++c) {
        batch.weight[c] = t.batch_rstd[c] * (batch.weight[c] - t.batch_mean[c] * batch.bias[c]);
        dbias[c] = static_cast<float>(batch.bias[c]);
        dweight[c] = static_cast<float>(batch.weight[c]);
    }
}

struct Coefficients {  // dx = for_dy * dy + for_x * (x - center) + rest
    float for_dy, for_x, rest;
};

// The coefficients of all rows of a slab, at the stride of the given array.
void slab_coefficients(const Tables& t, const RowSums& sums, const BatchSums& batch, const Affine& affine,
                       const Sizes& s, Index n, Index g, Coefficients* result) {
    const Index k = s.per_group();
    const double u = t.group_mean[n * s.groups + g], r = t.group_rstd[n * s.groups + g];
    const double samples = static_cast<double>(s.n), count = samples * static_cast<double>(s.length);
    double s1 = 0, s2 = 0;
    for (Index c = g * k; c < (g + 1) * k; ++c) {
        const Index row = n * s.c + c;
        const double gain = t.batch_rstd[c] * affine.scale(c), slope = t.batch_rstd[c] * batch.weight[c] / samples;
        const double a1 = (t.mean[row] - u) * r, a2 = t.var[row] * r * r + a1 * a1, by_bias = batch.bias[c] / samples;
        s1 += gain * (sums.dy[row] - by_bias - slope * (a1 - t.batch_mean[c]));
        s2 += gain * (sums.dyx[row] - a1 * by_bias - slope * (a2 - t.batch_mean[c] * a1));
    }
    s1 /= static_cast<double>(k * s.length), s2 /= static_cast<double>(k * s.length);
    for (Index c = g * k; c < (g + 1) * k; ++c) {
        const double gain = t.batch_rstd[c] * affine.scale(c), i = t.batch_rstd[c];
        const double center = static_cast<float>(t.mean[n * s.c + c]);
        const double q = -r * (gain * i * batch.weight[c] / count + s2);
        const double level = r * (gain * (i * t.batch_mean[c] * batch.weight[c] - batch.bias[c]) / count - s1);
        result[c - g * k] = {static_cast<float>(r * gain), static_cast<float>(q * r),
                             static_cast<float>(level + q * r * (center - u))};
    }
}

template <int RELU, class T>
inline void write_gradients(const T* __restrict x, const T* __restrict dy, const T* __restrict y, T* __restrict dx,
                            T* __restrict dresidual, Index length, Line line, Coefficients by) {
    for (Index i = 0; i < length; ++i) {
        const float value = to_float(x[i]), saved = RELU == 1 ? to_float(y[i]) : 0.0f;
        const float g = masked<RELU>(to_float(dy[i]), saved, line.at(value));
        store(dx + i, by.for_dy * g + by.for_x * (value - line.center) + by.rest);
        if (RELU == 1) store(dresidual + i, g);
    }
}

// The six numbers of a channel are in separate arrays: center, slope, offset, for_dy, for_x, rest.
template <int RELU, class T>
inline void write_gradients(const T* __restrict x, const T* __restrict dy, const T* __restrict y, T* __restrict dx,
                            T* __restrict dresidual, Index positions, Index channels,
                            const float* __restrict numbers) {
    const float *center = numbers, *slope = center + channels, *offset = slope + channels;
    const float *for_dy = offset + channels, *for_x = for_dy + channels, *rest = for_x + channels;
    Index c = for_strips(channels, [&](auto size, Index c) {
        constexpr int SIZE = decltype(size)::value;
        const Strip<SIZE> middle(center + c), factor(slope + c), level(offset + c);
        const Strip<SIZE> by_dy(for_dy + c), by_x(for_x + c), by_one(rest + c);
        for (Index i = 0; i < positions; ++i)
            for (int v = 0; v < SIZE; ++v) {
                const Index at = i * channels + c + v * WIDTH;
                const Vector d = load(x + at) - middle.part[v], saved = RELU == 1 ? load(y + at) : d;
                const Vector g = masked<RELU>(load(dy + at), saved, factor.part[v] * d + level.part[v]);
                store(dx + at, by_dy.part[v] * g + by_x.part[v] * d + by_one.part[v]);
                if (RELU == 1) store(dresidual + at, g);
            }
    });
    if (c == channels) return;
    for (Index i = 0; i < positions; ++i)
        for (Index j = c; j < channels; ++j) {
            const Index at = i * channels + j;
            const float d = to_float(x[at]) - center[j], saved = RELU == 1 ? to_float(y[at]) : 0.0f;
            const float g = masked<RELU>(to_float(dy[at]), saved, slope[j] * d + offset[j]);
            store(dx + at, for_dy[j] * g + for_x[j] * d + rest[j]);
            if (RELU == 1) store(dresidual + at, g);
        }
}

template <int RELU, class T, class... Rest>
inline void write_gradients_at(const Input<T>& in, Index at, Rest... rest) {
    write_gradients<RELU>(in.x + at, in.dy + at, (RELU == 1 ? in.y : in.x) + at, in.dx + at,
                          RELU == 1 ? in.dresidual + at : nullptr, rest...);
}

template <int RELU, class T>
void backward_rows(const Input<T>& in, const Tables& t, const Affine& affine, const Sizes& s, const RowSums& sums,
                   const BatchSums& batch, Coefficients* coefficients, float* dweight, float* dbias, int threads) {
#pragma omp parallel num_threads(s.team(threads))
    {
        const Range slabs = share(s.n * s.groups);
        const Index k = s.per_group();
        for (Index i = slabs.begin; i < slabs.end; ++i)
            for (Index j = 0; j < k; ++j) {
                const Index n = i / s.groups, g = i % s.groups, row = i * k + j;
                row_sums<RELU>(in, row * s.length, s.length, line_of(t, affine, s, n, g, g * k + j), sums.dy[row],
                               sums.dyx[row]);
            }
#pragma omp barrier
        batch_sums(t, sums, batch, s, dweight, dbias, share(s.groups));
#pragma omp barrier
        for (Index i = slabs.end - 1; in.dx && i >= slabs.begin; --i) {
            const Index n = i / s.groups, g = i % s.groups;
            slab_coefficients(t, sums, batch, affine, s, n, g, coefficients + i * k);
            for (Index j = k - 1; j >= 0; --j)
                write_gradients_at<RELU>(in, (i * k + j) * s.length, s.length, line_of(t, affine, s, n, g, g * k + j),
                                         coefficients[i * k + j]);
        }
    }
}

template <int RELU, class T>
void backward_segments(const Input<T>& in, const Tables& t, const Affine& affine, const Sizes& s, const RowSums& sums,
                       const BatchSums& batch, Coefficients* coefficients, float* dweight, float* dbias, int threads,
                       float* buffers, double* partial) {
#pragma omp parallel num_threads(s.team(threads))
    {
        const Index count = s.segments(), k = s.per_group();
        const Range segments = share(s.n * count), samples = share(s.n);
        float* buffer = buffers + omp_get_thread_num() * 6 * s.c;
        for (Index i = segments.begin; i < segments.end; ++i) {
            lines_of(t, affine, s, i / count, buffer);
            segment_sums<RELU>(in, s, i / count, i % count, buffer, buffer + 3 * s.c, partial + i * 2 * s.c);
        }
#pragma omp barrier
        for (Index n = samples.begin; n < samples.end; ++n) add_segments(partial, sums, s, n);
#pragma omp barrier
        batch_sums(t, sums, batch, s, dweight, dbias, share(s.groups));
#pragma omp barrier
        for (Index n = samples.begin; n < samples.end; ++n)
            for (Index g = 0; g < s.groups; ++g)
                slab_coefficients(t, sums, batch, affine, s, n, g, coefficients + n * s.c + g * k);
#pragma omp barrier
        for (Index i = segments.end - 1; in.dx && i >= segments.begin; --i) {
            const Index n = i / count, begin = s.segment_begin(i % count), end = s.segment_begin(i % count + 1);
            lines_of(t, affine, s, n, buffer);
            float* by = buffer + 3 * s.c;
            for (Index c = 0; c < s.c; ++c) {
                const Coefficients& row = coefficients[n * s.c + c];
                by[c] = row.for_dy, by[s.c + c] = row.for_x, by[2 * s.c + c] = row.rest;
            }
            for_runs(end - begin, s.c, [&](Index first, Index run) {
                write_gradients_at<RELU>(in, (n * s.length + begin + first) * s.c, run, s.c,
                                         static_cast<const float*>(buffer));
            });
        }
    }
}

template <int RELU, class T>
int backward(const Input<T>& in, const Affine& affine, double* table, float* dweight, float* dbias, const Sizes& s,
             int threads) {
    const Tables t(table, s);
    const std::unique_ptr<double[]> memory(new (std::nothrow) double[2 * s.n * s.c + 2 * s.c]);
    const std::unique_ptr<Coefficients[]> coefficients(new (std::nothrow) Coefficients[s.n * s.c]);
    if (!memory || !coefficients) return 1;
    const RowSums sums{memory.get(), memory.get() + s.n * s.c};
    const BatchSums batch{sums.dyx + s.n * s.c, sums.dyx + s.n * s.c + s.c};
    if (!s.channels_last) {
        backward_rows<RELU>(in, t, affine, s, sums, batch, coefficients.get(), dweight, dbias, threads);
        return 0;
    }
    const std::unique_ptr<float[]> buffers(new (std::nothrow) float[s.team(threads) * 6 * s.c]);
    const std::unique_ptr<double[]> partial(new (std::nothrow) double[s.n * s.segments() * 2 * s.c]);
    if (!buffers || !partial) return 1;
    backward_segments<RELU>(in, t, affine, s, sums, batch, coefficients.get(), dweight, dbias, threads, buffers.get(),
                            partial.get());
    return 0;
}

template <class T>
int backward_of(const void* dy, const void* x, const void* y, const float* weight, const float* bias, double* table,
                void* dx, float* dweight, float* dbias, void* dresidual, const Sizes& s, bool relu, int threads) {
    const Input<T> in{static_cast<const T*>(x), static_cast<const T*>(dy), static_cast<const T*>(y),
                      static_cast<T*>(dx), static_cast<T*>(dresidual), relu};
    const Affine affine{weight, bias};
    if (!relu) return backward<0>(in, affine, table, dweight, dbias, s, threads);
    if (y) return backward<1>(in, affine, table, dweight, dbias, s, threads);
    return backward<2>(in, affine, table, dweight, dbias, s, threads);
}

}  // namespace

// --- functions of the library: 0 if they succeed, 1 if there is not enough memory ----------------------------------
// Sizes are N, C, L and G. Data is float32, or bfloat16 if `half`; parameters and moments are float32. Pointers to a
// weight, a bias, a residual, running moments, an output for ReLU and a gradient of x may be null.

extern "C" {

int contnorm_cn_train(const void* x, const float* weight, const float* bias, const void* residual, void* y,
                      double* table, float* moments, float* running_mean, float* running_var, Index n, Index c,
                      Index length, Index groups, int channels_last, int half, double momentum, double eps, int relu,
                      int threads) {
    const Sizes s{n, c, length, groups, channels_last != 0};
    const Running running{running_mean, running_var, momentum};
    if (half)
        return train<BFloat16>(x, weight, bias, residual, y, table, moments, running, s, eps, relu != 0, threads);
    return train<float>(x, weight, bias, residual, y, table, moments, running, s, eps, relu != 0, threads);
}

int contnorm_cn_evaluate(const void* x, const float* mean, const float* var, const float* weight, const float* bias,
                         const void* residual, void* y, Index n, Index c, Index length, Index groups,
                         int channels_last, int half, double eps, int relu, int threads) {
    const Sizes s{n, c, length, groups, channels_last != 0};
    if (half)
        return evaluate(static_cast<const BFloat16*>(x), mean, var, weight, bias,
                        static_cast<const BFloat16*>(residual), static_cast<BFloat16*>(y), s, eps, relu != 0, threads);
    return evaluate(static_cast<const float*>(x), mean, var, weight, bias, static_cast<const float*>(residual),
                    static_cast<float*>(y), s, eps, relu != 0, threads);
}

int contnorm_cn_backward(const void* dy, const void* x, const void* y, const float* weight, const float* bias,
                         double* table, void* dx, float* dweight, float* dbias, void* dresidual, Index n, Index c,
                         Index length, Index groups, int channels_last, int half, int relu, int threads) {
    const Sizes s{n, c, length, groups, channels_last != 0};
    if (half)
        return backward_of<BFloat16>(dy, x, y, weight, bias, table, dx, dweight, dbias, dresidual, s, relu != 0,
                                     threads);
    return backward_of<float>(dy, x, y, weight, bias, table, dx, dweight, dbias, dresidual, s, relu != 0, threads);
}
}

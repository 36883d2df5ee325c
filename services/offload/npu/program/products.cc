#include "products.h"

#include <chrono>
#include <cmath>

enum { SUM_BLOCK = 128, LANES = 8, SOME_TOKENS = 16, START_TOKENS = 32 /* the value in plans/plan/runtime_memory.py */ };

/* ---- arithmetic -------------------------------------------------------------------------------------------------------- */
/* The sum in numpy's order: eight lanes in blocks of 128; longer arrays are halved. */
static float sum_of_squares(const float *x, size_t n)
{
    if (n > SUM_BLOCK) {
        const size_t half = n / 2 - n / 2 % LANES;
        return sum_of_squares(x, half) + sum_of_squares(x + half, n - half);
    }
    float lanes[LANES] = {0}, sum = 0;
    size_t at = 0;
    if (n >= LANES) {
        for (; at + LANES <= n; at += LANES)
            for (size_t lane = 0; lane < LANES; lane++)
                lanes[lane] += x[at + lane] * x[at + lane];
        sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    }
    for (; at < n; at++)
        sum += x[at] * x[at];
    return sum;
}

static bool is_at_end(const uint16_t *integers, size_t count)
{
    uint16_t low = MOST, high = 0;
    for (size_t n = 0; n < count; n++) {
        low = std::min(low, integers[n]);
        high = std::max(high, integers[n]);
    }
    return low == 0 || high == MOST;
}

static const float *input_of(const np_product &product, uint32_t token)
{
    return product.inputs + static_cast<size_t>(product.token ? product.token[token] : token) * product.inputs_stride;
}

static float *output_of(const np_product &product, uint32_t token)
{
    return product.outputs + static_cast<size_t>(token) * product.outputs_stride;
}

/* The graph length for the next part of so many tokens, as graphs_for of plans/plan/runtime_memory.py chooses it. */
static size_t next_length(const GraphLengths &graph, uint32_t tokens)
{
    const auto holding = [&](uint32_t count) {
        size_t n = 0;
        while (n + 1 < graph.sessions.size() && graph.sessions[n].first < count)
            n++;
        return n;
    };
    const size_t number = holding(tokens);
    const uint32_t length = graph.sessions[number].first;
    if (tokens >= length || number == 0)
        return number;
    const uint32_t shorter = graph.sessions[number - 1].first, turns = tokens / shorter, rest = tokens % shorter;
    const uint32_t ends = rest ? graph.sessions[holding(rest)].first + START_TOKENS : 0;
    return turns * (shorter + START_TOKENS) + ends < length + START_TOKENS ? number - 1 : number;
}

/* Call with (first token, tokens, graph's length, session) until all tokens are covered. */
template <typename Call> static void by_graphs(const GraphLengths &graph, uint32_t tokens, Call call)
{
    for (uint32_t first = 0; first < tokens;) {
        const auto &next = graph.sessions[next_length(graph, tokens - first)];
        call(first, std::min(next.first, tokens - first), next.first, *next.second);
        first += next.first;
    }
}

/* Call with each token, on all threads. */
template <typename Call> static void share_tokens(ThreadPool &pool, uint32_t tokens, Call call)
{
    pool.share((tokens + SOME_TOKENS - 1) / SOME_TOKENS, [&](size_t part) {
        for (uint32_t t = static_cast<uint32_t>(part) * SOME_TOKENS, n = 0; n < SOME_TOKENS && t < tokens; t++, n++)
            call(t);
    });
}

/* ---- inputs ------------------------------------------------------------------------------------------------------------ */
Products::Products(const np_shape &shape, uint32_t max_tokens, uint32_t threads, Graphs &graphs)
    : shape_(shape), graphs_(graphs), rows_(shape, graphs, threads), threads_(threads)
{
    size_t most_rows = shape.width, most_columns = shape.width;
    for (const Graphs::Matrix &m : graphs.matrices) {
        most_rows = std::max<size_t>(most_rows, m.rows);
        most_columns = std::max<size_t>(most_columns, m.columns);
    }
    const size_t longest = graphs.feed_forward.sessions.back().first, padded = (max_tokens + longest - 1) / longest * longest;
    lengths_.resize(max_tokens);
    invalid_.resize(max_tokens);
    clamped_.resize(max_tokens);
    x_.resize(padded * most_columns);
    row_.resize(most_rows);
    for (Work &work : works_) {
        work.y.resize(padded * (&work == works_ ? most_rows : shape.width)); /* only the first one is used for matrices */
        work.peaks.assign(graphs.peaks.size(), std::vector<uint16_t>(padded));
    }
    std::thread(&Products::serve, this).detach(); /* runs as long as the process */
}

/* Set a token's scale: the root mean square of its input, if tokens have scales of their own. A non-finite input, or
 * one beyond the range, is left to the engine. */
void Products::measure(const np_product &product, const Scale &scale, uint32_t t)
{
    const float *x = input_of(product, t), limit = static_cast<float>(scale.step * (MOST - MIDDLE));
    const float mean = static_cast<float>(sum_of_squares(x, product.columns) / static_cast<double>(product.columns));
    const float length = std::sqrt(mean);
    invalid_[t] = !std::isfinite(length);
    lengths_[t] = graphs_.by_token && std::isfinite(length) && length > 0 ? length : 1;
    for (uint32_t j = 0; !graphs_.by_token && j < product.columns; j++)
        invalid_[t] |= !(std::fabs(x[j]) <= limit);
}

void Products::encode_token(const np_product &product, uint32_t t)
{
    const Scale &scale = product.kind == NP_PRODUCT_NEURONS ? graphs_.x : matrix_of(product)->x;
    const float step = static_cast<float>(scale.step), zero = static_cast<float>(scale.zero), *x = input_of(product, t);
    uint16_t *to = x_.data() + static_cast<size_t>(t) * product.columns;
    measure(product, scale, t);
    if (invalid_[t]) {
        std::fill_n(to, product.columns, static_cast<uint16_t>(scale.zero));
        return;
    }
    for (uint32_t j = 0; j < product.columns; j++)
        to[j] = to_integer(x[j] / lengths_[t], step, zero);
}

/* Encode all tokens as integers, padded with zeros to the graphs' lengths. */
void Products::encode(const np_product &product)
{
    share_tokens(threads_, product.tokens, [&](uint32_t t) { encode_token(product, t); });
    by_graphs(graph_of(product), product.tokens, [&](uint32_t first, uint32_t count, uint32_t length, Session &) {
        std::fill_n(x_.data() + static_cast<size_t>(first + count) * product.columns, static_cast<size_t>(length - count) * product.columns,
                    static_cast<uint16_t>(MIDDLE));
    });
}

const Graphs::Matrix *Products::matrix_of(const np_product &product) const
{
    for (const Graphs::Matrix &m : graphs_.matrices)
        if (product.kind != NP_PRODUCT_NEURONS && m.rows == product.rows && m.columns == product.columns)
            return &m;
    return nullptr;
}

const GraphLengths &Products::graph_of(const np_product &product) const
{
    const Graphs::Matrix *matrix = matrix_of(product);
    const bool is_of_neurons = product.kind == NP_PRODUCT_NEURONS && product.rows <= graphs_.neurons && product.columns == shape_.width;
    if (!matrix && !is_of_neurons)
        throw RuntimeError("there is no graph for a product of " + std::to_string(product.rows) + " x " + std::to_string(product.columns));
    return matrix ? matrix->graph : graphs_.feed_forward;
}

/* ---- the graphs' thread -------------------------------------------------------------------------------------------------- */
void Products::serve()
{
    for (;;) {
        Work *work;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return !waiting_.empty(); });
            work = waiting_.front();
            waiting_.pop_front();
        }
        try {
            run(work);
        } catch (const std::exception &error) {
            work->error = error.what();
        }
        std::lock_guard<std::mutex> lock(mutex_);
        work->is_done = true;
        changed_.notify_all();
    }
}

void Products::run(Work *work)
{
    const np_product &product = work->product;
    work->rows = rows_.take();
    if (!work->rows)
        return;
    PreparedRows &prepared = *work->rows;
    work->place = prepared.place;
    work->max_scale = prepared.max_scale;
    if (prepared.place.kind != product.kind || prepared.place.layer != product.layer || prepared.place.rows != product.rows)
        throw RuntimeError("layer " + std::to_string(product.layer) + ": rows came for another product");
    const auto before = std::chrono::steady_clock::now();
    const Graphs::Matrix *matrix = matrix_of(product);
    if (matrix)
        work->scales.assign(prepared.scales[0].begin(), prepared.scales[0].begin() + product.rows);
    if (prepared.max_scale != 0 && std::isfinite(prepared.max_scale))
        by_graphs(graph_of(product), product.tokens,
                  [&](uint32_t first, uint32_t, uint32_t length, Session &session) { run_part(work, first, length, session, matrix); });
    graphs_ms_ += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - before).count();
    rows_.release(work->rows);
}

void Products::run_part(Work *work, uint32_t first, uint32_t length, Session &session, const Graphs::Matrix *matrix)
{
    const np_product &product = work->product;
    PreparedRows &prepared = *work->rows;
    const uint32_t rows = matrix ? product.rows : graphs_.neurons;
    std::vector<Tensor> inputs = {{"x", ORT_U16, length, product.columns, x_.data() + static_cast<size_t>(first) * product.columns}};
    if (matrix) {
        inputs.push_back({"w", ORT_S8, rows, product.columns, prepared.rows[0].data()});
    } else {
        inputs.push_back({"factor", ORT_U16, 1, rows, prepared.factor.data()});
        inputs.push_back({"gate", ORT_S8, rows, product.columns, prepared.rows[0].data()});
        inputs.push_back({"up", ORT_S8, rows, product.columns, prepared.rows[1].data()});
        inputs.push_back({"down", ORT_S8, rows, product.columns, prepared.rows[2].data()});
    }
    std::vector<Tensor> outputs = {{"y", ORT_U16, length, product.outputs_stride, work->y.data() + static_cast<size_t>(first) * product.outputs_stride}};
    for (size_t n = 0; !matrix && n < graphs_.peaks.size(); n++)
        outputs.push_back({graphs_.peaks[n].name.c_str(), ORT_U16, length, 1, work->peaks[n].data() + first});
    session.run(inputs, outputs);
}

/* ---- steps --------------------------------------------------------------------------------------------------------------- */
void Products::begin(np_engine *engine)
{
    idle_ = {&works_[0], &works_[1]};
    running_.clear();
    recomputed_ = 0;
    graphs_ms_ = 0;
    rows_.begin(engine);
}

void Products::end()
{
    rows_.end();
    std::unique_lock<std::mutex> lock(mutex_);
    for (const Work *work : running_)
        changed_.wait(lock, [&] { return work->is_done; });
}

int Products::compute(const np_product &product)
{
    rows_.notify_product();
    if (product.tokens > lengths_.size() || product.outputs_stride > row_.size())
        throw RuntimeError("a step has more tokens than were planned");
    if (product.number == 0) {
        encode(product);
        idle_ = {&works_[0], &works_[1]}; /* no product is running; matrices need the first buffer */
    }
    Work *work = idle_.front();
    idle_.pop_front();
    work->product = product;
    work->is_done = false;
    work->error.clear();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        running_.push_back(work);
        waiting_.push_back(work);
        changed_.notify_all();
    }
    const size_t may_run = product.number + 1 < product.count ? 1 : 0;
    int result = NP_OK;
    while (result == NP_OK && running_.size() > may_run)
        result = finish();
    return result;
}

/* Wait for the oldest running product and store its result. */
int Products::finish()
{
    Work *work = running_.front();
    {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return work->is_done; });
        running_.pop_front();
    }
    idle_.push_back(work);
    if (!work->error.empty())
        throw RuntimeError(work->error);
    if (!work->rows)
        return rows_.failure();
    std::copy_n(invalid_.begin(), work->product.tokens, clamped_.begin());
    share_tokens(threads_, work->product.tokens, [&](uint32_t t) {
        if (work->product.kind == NP_PRODUCT_NEURONS)
            add_neurons(*work, t);
        else
            store_matrix(*work, t);
    });
    return recompute_clamped(*work);
}

void Products::store_matrix(const Work &work, uint32_t t)
{
    const np_product &product = work.product;
    const Graphs::Matrix *matrix = matrix_of(product);
    const float zero = static_cast<float>(matrix->y.zero), step = static_cast<float>(matrix->y.step);
    const uint16_t *y = work.y.data() + static_cast<size_t>(t) * product.rows;
    float *out = output_of(product, t);
    clamped_[t] |= is_at_end(y, product.rows);
    for (uint32_t r = 0; r < product.rows; r++)
        out[r] = (static_cast<float>(y[r]) - zero) * step * lengths_[t] * work.scales[r];
}

/* Add the product to the output, unless the token was clamped. */
void Products::add_neurons(const Work &work, uint32_t t)
{
    const uint32_t width = shape_.width;
    const float zero = static_cast<float>(graphs_.y.zero), step = static_cast<float>(graphs_.y.step);
    if (work.max_scale == 0)
        return;
    if (!std::isfinite(work.max_scale)) {
        clamped_[t] = 1;
        return;
    }
    const uint16_t *y = work.y.data() + static_cast<size_t>(t) * width;
    clamped_[t] |= is_at_end(y, width);
    for (size_t n = 0; n < graphs_.peaks.size(); n++)
        clamped_[t] |= work.peaks[n][t] == MOST || (graphs_.peaks[n].is_signed && work.peaks[n][t] == 0);
    const double factor = static_cast<double>(lengths_[t]) * lengths_[t] * work.max_scale;
    float *out = output_of(work.product, t);
    for (uint32_t j = 0; !clamped_[t] && j < width; j++)
        out[j] += static_cast<float>((static_cast<float>(y[j]) - zero) * step * factor);
}

/* Recompute clamped tokens by the engine's own kernels. */
int Products::recompute_clamped(const Work &work)
{
    const np_product &product = work.product;
    const uint32_t stride = product.outputs_stride;
    for (uint32_t t = 0; t < product.tokens; t++) {
        if (!clamped_[t])
            continue;
        const int result = rows_.recompute(product, work.place, t, row_.data(), stride);
        if (result < 0)
            return result;
        recomputed_++;
        float *out = output_of(product, t);
        for (uint32_t j = 0; j < stride; j++)
            out[j] = product.kind == NP_PRODUCT_NEURONS ? out[j] + row_[j] : row_[j];
    }
    return NP_OK;
}

std::map<std::string, double> Products::counters() const
{
    return {{"recomputed_tokens", static_cast<double>(recomputed_)},
            {"rows_ready", static_cast<double>(rows_.ready)},
            {"rows_late", static_cast<double>(rows_.late)},
            {"rows_wait_ms", rows_.waited_ms},
            {"graphs_ms", graphs_ms_}};
}

#include "products.h"

#include <chrono>
#include <cmath>

enum { SUM_BLOCK = 128, LANES = 8, SOME_TOKENS = 16, START_TOKENS = 32 /* as plans/plan/runtime_memory.py has it */ };

/* ---- arithmetic -------------------------------------------------------------------------------------------------------- */
/* numpy's order of sums: eight lanes in blocks of 128, and halves of what is longer. */
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

static const float *input_of(const np_product &wanted, uint32_t token)
{
    return wanted.inputs + static_cast<size_t>(wanted.token ? wanted.token[token] : token) * wanted.inputs_stride;
}

static float *output_of(const np_product &wanted, uint32_t token)
{
    return wanted.outputs + static_cast<size_t>(token) * wanted.outputs_stride;
}

/* Which length of a graph computes the next of so many tokens: as graphs_for of plans/plan/runtime_memory.py chooses, which says how. */
static size_t next_length(const Lengths &graph, uint32_t tokens)
{
    const auto holding = [&](uint32_t count) {
        size_t n = 0;
        while (n + 1 < graph.sessions.size() && graph.sessions[n].first < count)
            n++;
        return n;
    };
    const size_t number = holding(tokens);
    const uint32_t whole = graph.sessions[number].first;
    if (tokens >= whole || number == 0)
        return number;
    const uint32_t shorter = graph.sessions[number - 1].first, turns = tokens / shorter, rest = tokens % shorter;
    const uint32_t ends = rest ? graph.sessions[holding(rest)].first + START_TOKENS : 0;
    return turns * (shorter + START_TOKENS) + ends < whole + START_TOKENS ? number - 1 : number;
}

/* Calls with (first token, tokens, graph's length, session) for all tokens. */
template <typename Call> static void by_graphs(const Lengths &graph, uint32_t tokens, Call call)
{
    for (uint32_t first = 0; first < tokens;) {
        const auto &next = graph.sessions[next_length(graph, tokens - first)];
        call(first, std::min(next.first, tokens - first), next.first, *next.second);
        first += next.first;
    }
}

/* Calls with each token, by all of the crew. */
template <typename Call> static void share_tokens(Crew &crew, uint32_t tokens, Call call)
{
    crew.share((tokens + SOME_TOKENS - 1) / SOME_TOKENS, [&](size_t part) {
        for (uint32_t t = static_cast<uint32_t>(part) * SOME_TOKENS, n = 0; n < SOME_TOKENS && t < tokens; t++, n++)
            call(t);
    });
}

/* ---- inputs ------------------------------------------------------------------------------------------------------------ */
Products::Products(const np_shape &shape, uint32_t most_tokens, uint32_t threads, Graphs &graphs)
    : shape_(shape), graphs_(graphs), rows_(shape, graphs, threads), sharers_(threads)
{
    size_t most_rows = shape.width, most_columns = shape.width;
    for (const Graphs::Matrix &m : graphs.matrices) {
        most_rows = std::max<size_t>(most_rows, m.rows);
        most_columns = std::max<size_t>(most_columns, m.columns);
    }
    const size_t longest = graphs.feed_forward.sessions.back().first, padded = (most_tokens + longest - 1) / longest * longest;
    lengths_.resize(most_tokens);
    unsound_.resize(most_tokens);
    clamped_.resize(most_tokens);
    x_.resize(padded * most_columns);
    row_.resize(most_rows);
    for (Work &work : works_) {
        work.y.resize(padded * (&work == works_ ? most_rows : shape.width)); /* the first alone is of matrices */
        work.peaks.assign(graphs.peaks.size(), std::vector<uint16_t>(padded));
    }
    std::thread(&Products::serve, this).detach(); /* as long as the process */
}

/* The root mean square of a token's input, where tokens have scales of their own. One that is no number, or beyond the range, is computed by the
 * engine. */
void Products::measure(const np_product &wanted, const Scale &scale, uint32_t t)
{
    const float *x = input_of(wanted, t), most = static_cast<float>(scale.step * (MOST - MIDDLE));
    const float mean = static_cast<float>(sum_of_squares(x, wanted.columns) / static_cast<double>(wanted.columns));
    const float length = std::sqrt(mean);
    unsound_[t] = !std::isfinite(length);
    lengths_[t] = graphs_.by_token && std::isfinite(length) && length > 0 ? length : 1;
    for (uint32_t j = 0; !graphs_.by_token && j < wanted.columns; j++)
        unsound_[t] |= !(std::fabs(x[j]) <= most);
}

void Products::encode_token(const np_product &wanted, uint32_t t)
{
    const Scale &scale = wanted.kind == NP_PRODUCT_NEURONS ? graphs_.x : matrix_of(wanted)->x;
    const float step = static_cast<float>(scale.step), zero = static_cast<float>(scale.zero), *x = input_of(wanted, t);
    uint16_t *to = x_.data() + static_cast<size_t>(t) * wanted.columns;
    measure(wanted, scale, t);
    if (unsound_[t]) {
        std::fill_n(to, wanted.columns, static_cast<uint16_t>(scale.zero));
        return;
    }
    for (uint32_t j = 0; j < wanted.columns; j++)
        to[j] = to_integer(x[j] / lengths_[t], step, zero);
}

/* All tokens as integers, and zeros up to the graphs' lengths. */
void Products::encode(const np_product &wanted)
{
    share_tokens(sharers_, wanted.tokens, [&](uint32_t t) { encode_token(wanted, t); });
    by_graphs(graph_of(wanted), wanted.tokens, [&](uint32_t first, uint32_t count, uint32_t length, Session &) {
        std::fill_n(x_.data() + static_cast<size_t>(first + count) * wanted.columns, static_cast<size_t>(length - count) * wanted.columns,
                    static_cast<uint16_t>(MIDDLE));
    });
}

const Graphs::Matrix *Products::matrix_of(const np_product &wanted) const
{
    for (const Graphs::Matrix &m : graphs_.matrices)
        if (wanted.kind != NP_PRODUCT_NEURONS && m.rows == wanted.rows && m.columns == wanted.columns)
            return &m;
    return nullptr;
}

const Lengths &Products::graph_of(const np_product &wanted) const
{
    const Graphs::Matrix *matrix = matrix_of(wanted);
    const bool is_of_neurons = wanted.kind == NP_PRODUCT_NEURONS && wanted.rows <= graphs_.neurons && wanted.columns == shape_.width;
    if (!matrix && !is_of_neurons)
        throw RuntimeError("there is no graph for a product of " + std::to_string(wanted.rows) + " x " + std::to_string(wanted.columns));
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
            work->why = error.what();
        }
        std::lock_guard<std::mutex> lock(mutex_);
        work->is_done = true;
        changed_.notify_all();
    }
}

void Products::run(Work *work)
{
    const np_product &wanted = work->product;
    work->made = rows_.take();
    if (!work->made)
        return;
    Made &made = *work->made;
    work->place = made.place;
    work->most = made.most;
    if (made.place.kind != wanted.kind || made.place.layer != wanted.layer || made.place.rows != wanted.rows)
        throw RuntimeError("layer " + std::to_string(wanted.layer) + ": rows came for another product");
    const auto before = std::chrono::steady_clock::now();
    const Graphs::Matrix *matrix = matrix_of(wanted);
    if (matrix)
        work->scales.assign(made.scales[0].begin(), made.scales[0].begin() + wanted.rows);
    if (made.most != 0 && std::isfinite(made.most))
        by_graphs(graph_of(wanted), wanted.tokens,
                  [&](uint32_t first, uint32_t, uint32_t length, Session &session) { run_part(work, first, length, session, matrix); });
    graphs_ms_ += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - before).count();
    rows_.give_back(work->made);
}

void Products::run_part(Work *work, uint32_t first, uint32_t length, Session &session, const Graphs::Matrix *matrix)
{
    const np_product &wanted = work->product;
    Made &made = *work->made;
    const uint32_t rows = matrix ? wanted.rows : graphs_.neurons;
    std::vector<Tensor> inputs = {{"x", ORT_U16, length, wanted.columns, x_.data() + static_cast<size_t>(first) * wanted.columns}};
    if (matrix) {
        inputs.push_back({"w", ORT_S8, rows, wanted.columns, made.rows[0].data()});
    } else {
        inputs.push_back({"factor", ORT_U16, 1, rows, made.factor.data()});
        inputs.push_back({"gate", ORT_S8, rows, wanted.columns, made.rows[0].data()});
        inputs.push_back({"up", ORT_S8, rows, wanted.columns, made.rows[1].data()});
        inputs.push_back({"down", ORT_S8, rows, wanted.columns, made.rows[2].data()});
    }
    std::vector<Tensor> outputs = {{"y", ORT_U16, length, wanted.outputs_stride, work->y.data() + static_cast<size_t>(first) * wanted.outputs_stride}};
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

int Products::compute(const np_product &wanted)
{
    rows_.want();
    if (wanted.tokens > lengths_.size() || wanted.outputs_stride > row_.size())
        throw RuntimeError("a step has more tokens than were planned");
    if (wanted.number == 0) {
        encode(wanted);
        idle_ = {&works_[0], &works_[1]}; /* nothing runs: the first is that of matrices */
    }
    Work *work = idle_.front();
    idle_.pop_front();
    work->product = wanted;
    work->is_done = false;
    work->why.clear();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        running_.push_back(work);
        waiting_.push_back(work);
        changed_.notify_all();
    }
    const size_t may_run = wanted.number + 1 < wanted.count ? 1 : 0;
    int result = NP_OK;
    while (result == NP_OK && running_.size() > may_run)
        result = finish();
    return result;
}

/* Take the result of the oldest that runs. */
int Products::finish()
{
    Work *work = running_.front();
    {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return work->is_done; });
        running_.pop_front();
    }
    idle_.push_back(work);
    if (!work->why.empty())
        throw RuntimeError(work->why);
    if (!work->made)
        return rows_.failure();
    std::copy_n(unsound_.begin(), work->product.tokens, clamped_.begin());
    share_tokens(sharers_, work->product.tokens, [&](uint32_t t) {
        if (work->product.kind == NP_PRODUCT_NEURONS)
            add_neurons(*work, t);
        else
            take_matrix(*work, t);
    });
    return again(*work);
}

void Products::take_matrix(const Work &work, uint32_t t)
{
    const np_product &wanted = work.product;
    const Graphs::Matrix *matrix = matrix_of(wanted);
    const float zero = static_cast<float>(matrix->y.zero), step = static_cast<float>(matrix->y.step);
    const uint16_t *y = work.y.data() + static_cast<size_t>(t) * wanted.rows;
    float *out = output_of(wanted, t);
    clamped_[t] |= is_at_end(y, wanted.rows);
    for (uint32_t r = 0; r < wanted.rows; r++)
        out[r] = (static_cast<float>(y[r]) - zero) * step * lengths_[t] * work.scales[r];
}

/* To what is there, unless the token was clamped. */
void Products::add_neurons(const Work &work, uint32_t t)
{
    const uint32_t width = shape_.width;
    const float zero = static_cast<float>(graphs_.y.zero), step = static_cast<float>(graphs_.y.step);
    if (work.most == 0)
        return;
    if (!std::isfinite(work.most)) {
        clamped_[t] = 1;
        return;
    }
    const uint16_t *y = work.y.data() + static_cast<size_t>(t) * width;
    clamped_[t] |= is_at_end(y, width);
    for (size_t n = 0; n < graphs_.peaks.size(); n++)
        clamped_[t] |= work.peaks[n][t] == MOST || (graphs_.peaks[n].is_signed && work.peaks[n][t] == 0);
    const double factor = static_cast<double>(lengths_[t]) * lengths_[t] * work.most;
    float *out = output_of(work.product, t);
    for (uint32_t j = 0; !clamped_[t] && j < width; j++)
        out[j] += static_cast<float>((static_cast<float>(y[j]) - zero) * step * factor);
}

/* Those that were clamped, by the engine's own kernels. */
int Products::again(const Work &work)
{
    const np_product &wanted = work.product;
    const uint32_t stride = wanted.outputs_stride;
    for (uint32_t t = 0; t < wanted.tokens; t++) {
        if (!clamped_[t])
            continue;
        const int result = rows_.compute_again(wanted, work.place, t, row_.data(), stride);
        if (result < 0)
            return result;
        recomputed_++;
        float *out = output_of(wanted, t);
        for (uint32_t j = 0; j < stride; j++)
            out[j] = wanted.kind == NP_PRODUCT_NEURONS ? out[j] + row_[j] : row_[j];
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

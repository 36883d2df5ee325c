#include "rows.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "integers.h"

enum { NEURON_BUFFERS = 2, PART_ROWS = 256 };

/* ---- a thread pool -------------------------------------------------------------------------------------------------------- */
ThreadPool::ThreadPool(uint32_t threads) : helpers_(threads > 1 ? threads - 1 : 0)
{
    for (uint32_t n = 0; n < helpers_; n++)
        std::thread(&ThreadPool::serve, this).detach(); /* runs as long as the process */
}

void ThreadPool::take_parts()
{
    for (size_t part; (part = next_.fetch_add(1)) < parts_;)
        (*call_)(part);
}

void ThreadPool::serve()
{
    for (uint64_t last_number = 0;;) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return number_ != last_number; });
            last_number = number_;
        }
        take_parts();
        std::lock_guard<std::mutex> lock(mutex_);
        if (--busy_ == 0)
            changed_.notify_all();
    }
}

void ThreadPool::share(size_t parts, const std::function<void(size_t)> &call)
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        call_ = &call;
        parts_ = parts;
        next_ = 0;
        busy_ = helpers_;
        number_++;
    }
    changed_.notify_all();
    take_parts();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return busy_ == 0; });
}

/* ---- between two threads -------------------------------------------------------------------------------------------- */
RowsAhead::RowsAhead(const np_shape &shape, const Graphs &graphs, uint32_t threads)
    : shape_(shape), factor_(graphs.factor), neurons_(graphs.neurons), converters_(threads)
{
    const size_t heads_width = static_cast<size_t>(shape.query_heads) * shape.head_width;
    const size_t qkv_rows = heads_width + 2 * static_cast<size_t>(shape.key_heads) * shape.head_width;
    const auto add = [&](int kind, size_t matrices, size_t rows, size_t columns) {
        buffers_.emplace_back(new PreparedRows());
        for (size_t n = 0; n < matrices; n++) {
            buffers_.back()->rows[n].resize(rows * columns);
            buffers_.back()->scales[n].resize(rows);
        }
        buffers_.back()->factor.resize(kind == NP_PRODUCT_NEURONS ? rows : 0);
        free_[kind].push_back(buffers_.back().get());
    };
    add(NP_PRODUCT_QKV, 1, qkv_rows, shape.width);
    add(NP_PRODUCT_ATTENTION_OUTPUT, 1, shape.width, heads_width);
    for (int n = 0; n < NEURON_BUFFERS; n++)
        add(NP_PRODUCT_NEURONS, 3, neurons_, shape.width);
    std::thread(&RowsAhead::serve, this).detach(); /* runs as long as the process */
}

void RowsAhead::begin(np_engine *engine)
{
    std::lock_guard<std::mutex> lock(mutex_);
    is_idle_ = false;
    failure_ = NP_OK;
    requests_ = ready = late = 0;
    waited_ms = 0;
    engine_ = engine;
    changed_.notify_all();
}

void RowsAhead::end()
{
    std::unique_lock<std::mutex> lock(mutex_);
    is_idle_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !engine_; });
    for (PreparedRows *rows : ready_rows_)
        free_[rows->place.kind].push_back(rows);
    ready_rows_.clear();
}

void RowsAhead::notify_product()
{
    std::lock_guard<std::mutex> lock(mutex_);
    requests_++;
    changed_.notify_all();
}

PreparedRows *RowsAhead::take()
{
    std::unique_lock<std::mutex> lock(mutex_);
    if (ready_rows_.empty()) {
        const auto before = std::chrono::steady_clock::now();
        late++;
        changed_.wait(lock, [&] { return !ready_rows_.empty() || failure_ != NP_OK || is_idle_; });
        waited_ms += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - before).count();
    } else {
        ready++;
    }
    if (ready_rows_.empty())
        return nullptr;
    PreparedRows *rows = ready_rows_.front();
    ready_rows_.pop_front();
    return rows;
}

void RowsAhead::release(PreparedRows *rows)
{
    std::lock_guard<std::mutex> lock(mutex_);
    free_[rows->place.kind].push_back(rows);
    changed_.notify_all();
}

int RowsAhead::recompute(const np_product &product, const np_product_rows &place, uint32_t token, float *out, size_t stride)
{
    Recomputation request = {&product, place, token, out, stride, false};
    std::unique_lock<std::mutex> lock(mutex_);
    if (failure_ != NP_OK)
        return failure_;
    recomputation_ = &request;
    changed_.notify_all();
    changed_.wait(lock, [&] { return request.is_done || failure_ != NP_OK; });
    return failure_;
}

int RowsAhead::failure()
{
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_ != NP_OK ? failure_ : NP_E_EPOCH;
}

/* ---- the reader's thread -------------------------------------------------------------------------------------------- */
void RowsAhead::serve()
{
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return engine_; });
        }
        const int result = read();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            failure_ = result;
            changed_.notify_all();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return is_idle_; });
        np_engine_close_rows(engine_);
        engine_ = nullptr;
        changed_.notify_all();
    }
}

/* Prepare all rows of the step. Returns NP_OK or an error. */
int RowsAhead::read()
{
    np_product_rows place;
    int result;
    while ((result = next(&place)) == 1) {
        PreparedRows *rows;
        if (!wait_until([&] { return !free_[place.kind].empty(); }))
            return failure_;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            rows = free_[place.kind].front();
            free_[place.kind].pop_front();
        }
        rows->place = place;
        result = np_engine_open_rows(engine_, &rows->place);
        if (result >= 0)
            result = convert(rows);
        std::lock_guard<std::mutex> lock(mutex_);
        if (result < 0) {
            free_[place.kind].push_back(rows);
            return result;
        }
        ready_rows_.push_back(rows);
        changed_.notify_all();
    }
    if (result == NP_OK)
        wait_until([] { return false; });
    return result < 0 ? result : failure_;
}

/* Wait for a condition, and recompute tokens meanwhile. Returns false if the step is over or a recomputation failed. */
bool RowsAhead::wait_until(const std::function<bool()> &is_so)
{
    for (;;) {
        Recomputation *request;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return is_idle_ || recomputation_ || is_so(); });
            request = recomputation_;
            recomputation_ = nullptr;
            if (is_idle_ || !request)
                return !is_idle_;
        }
        int result = np_engine_open_rows(engine_, &request->place);
        if (result >= 0)
            result = np_engine_compute_product(engine_, request->product, &request->place, &request->token, 1, request->out, request->stride);
        std::lock_guard<std::mutex> lock(mutex_);
        request->is_done = true;
        failure_ = result < 0 ? result : failure_;
        changed_.notify_all();
        if (result < 0)
            return false;
    }
}

int RowsAhead::next(np_product_rows *place)
{
    for (;;) {
        uint64_t requests;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            requests = requests_;
        }
        const int result = np_engine_next_rows(engine_, place);
        if (result != NP_ROWS_UNKNOWN)
            return result;
        if (!wait_until([&] { return requests_ != requests; }))
            return failure_;
    }
}

int RowsAhead::convert(PreparedRows *rows)
{
    const np_product_rows &from = rows->place;
    const int matrices = from.kind == NP_PRODUCT_NEURONS ? 3 : 1;
    const size_t parts = (from.rows + PART_ROWS - 1) / PART_ROWS;
    std::atomic<bool> is_refused{rows->scales[0].size() < from.rows || rows->rows[0].size() < static_cast<size_t>(from.rows) * from.columns};
    if (is_refused)
        return NP_E_ARGUMENT;
    converters_.share(parts * static_cast<size_t>(matrices), [&](size_t part) {
        const size_t n = part / parts, first = part % parts * PART_ROWS, count = std::min<size_t>(PART_ROWS, from.rows - first);
        if (np_rows_to_s8(from.types[n], from.quants[n] + first, from.scales[n] + first, count, from.columns,
                          rows->rows[n].data() + first * from.columns, from.columns, rows->scales[n].data() + first) < 0)
            is_refused = true;
    });
    if (is_refused)
        return NP_E_ARGUMENT;
    rows->max_scale = 1;
    if (matrices == 1)
        return NP_OK;
    for (std::vector<int8_t> &rows : rows->rows)
        std::fill(rows.begin() + static_cast<ptrdiff_t>(from.rows) * from.columns, rows.end(), int8_t(0));
    std::vector<double> factors(neurons_);
    rows->max_scale = 0;
    for (uint32_t r = 0; r < from.rows; r++) {
        factors[r] = static_cast<double>(rows->scales[0][r]) * rows->scales[1][r] * rows->scales[2][r];
        rows->max_scale = std::isnan(factors[r]) || std::isnan(rows->max_scale) ? NAN : std::max(rows->max_scale, factors[r]);
    }
    if (rows->max_scale != 0 && std::isfinite(rows->max_scale))
        std::transform(factors.begin(), factors.end(), rows->factor.begin(),
                       [&](double f) { return to_integer(f / rows->max_scale, factor_.step, static_cast<double>(factor_.zero)); });
    return NP_OK;
}

#include "rows.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "integers.h"

enum { NEURON_BUFFERS = 2, PART_ROWS = 256 };

/* ---- a crew -------------------------------------------------------------------------------------------------------- */
Crew::Crew(uint32_t threads) : others_(threads > 1 ? threads - 1 : 0)
{
    for (uint32_t n = 0; n < others_; n++)
        std::thread(&Crew::serve, this).detach(); /* as long as the process */
}

void Crew::take_parts()
{
    for (size_t part; (part = next_.fetch_add(1)) < parts_;)
        (*call_)(part);
}

void Crew::serve()
{
    for (uint64_t seen = 0;;) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return number_ != seen; });
            seen = number_;
        }
        take_parts();
        std::lock_guard<std::mutex> lock(mutex_);
        if (--busy_ == 0)
            changed_.notify_all();
    }
}

void Crew::share(size_t parts, const std::function<void(size_t)> &call)
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        call_ = &call;
        parts_ = parts;
        next_ = 0;
        busy_ = others_;
        number_++;
    }
    changed_.notify_all();
    take_parts();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return busy_ == 0; });
}

/* ---- between two threads -------------------------------------------------------------------------------------------- */
RowsAhead::RowsAhead(const np_shape &shape, const Graphs &graphs, uint32_t threads)
    : shape_(shape), factor_(graphs.factor), neurons_(graphs.neurons), makers_(threads)
{
    const size_t heads_width = static_cast<size_t>(shape.query_heads) * shape.head_width;
    const size_t qkv_rows = heads_width + 2 * static_cast<size_t>(shape.key_heads) * shape.head_width;
    const auto add = [&](int kind, size_t matrices, size_t rows, size_t columns) {
        all_.emplace_back(new Made());
        for (size_t n = 0; n < matrices; n++) {
            all_.back()->rows[n].resize(rows * columns);
            all_.back()->scales[n].resize(rows);
        }
        all_.back()->factor.resize(kind == NP_PRODUCT_NEURONS ? rows : 0);
        free_[kind].push_back(all_.back().get());
    };
    add(NP_PRODUCT_QKV, 1, qkv_rows, shape.width);
    add(NP_PRODUCT_ATTENTION_OUTPUT, 1, shape.width, heads_width);
    for (int n = 0; n < NEURON_BUFFERS; n++)
        add(NP_PRODUCT_NEURONS, 3, neurons_, shape.width);
    std::thread(&RowsAhead::serve, this).detach(); /* as long as the process */
}

void RowsAhead::begin(np_engine *engine)
{
    std::lock_guard<std::mutex> lock(mutex_);
    is_over_ = false;
    failure_ = NP_OK;
    wanted_ = ready = late = 0;
    waited_ms = 0;
    engine_ = engine;
    changed_.notify_all();
}

void RowsAhead::end()
{
    std::unique_lock<std::mutex> lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !engine_; });
    for (Made *made : made_)
        free_[made->place.kind].push_back(made);
    made_.clear();
}

void RowsAhead::want()
{
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_++;
    changed_.notify_all();
}

Made *RowsAhead::take()
{
    std::unique_lock<std::mutex> lock(mutex_);
    if (made_.empty()) {
        const auto before = std::chrono::steady_clock::now();
        late++;
        changed_.wait(lock, [&] { return !made_.empty() || failure_ != NP_OK || is_over_; });
        waited_ms += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - before).count();
    } else {
        ready++;
    }
    if (made_.empty())
        return nullptr;
    Made *made = made_.front();
    made_.pop_front();
    return made;
}

void RowsAhead::give_back(Made *made)
{
    std::lock_guard<std::mutex> lock(mutex_);
    free_[made->place.kind].push_back(made);
    changed_.notify_all();
}

int RowsAhead::compute_again(const np_product &product, const np_product_rows &place, uint32_t token, float *out, size_t stride)
{
    Again asked = {&product, place, token, out, stride, false};
    std::unique_lock<std::mutex> lock(mutex_);
    if (failure_ != NP_OK)
        return failure_;
    again_ = &asked;
    changed_.notify_all();
    changed_.wait(lock, [&] { return asked.is_done || failure_ != NP_OK; });
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
        changed_.wait(lock, [&] { return is_over_; });
        np_engine_close_rows(engine_);
        engine_ = nullptr;
        changed_.notify_all();
    }
}

/* All rows of the step, until it is over: NP_OK, or an error. */
int RowsAhead::read()
{
    np_product_rows place;
    int result;
    while ((result = next(&place)) == 1) {
        Made *made;
        if (!until([&] { return !free_[place.kind].empty(); }))
            return failure_;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            made = free_[place.kind].front();
            free_[place.kind].pop_front();
        }
        made->place = place;
        result = np_engine_open_rows(engine_, &made->place);
        if (result >= 0)
            result = make(made);
        std::lock_guard<std::mutex> lock(mutex_);
        if (result < 0) {
            free_[place.kind].push_back(made);
            return result;
        }
        made_.push_back(made);
        changed_.notify_all();
    }
    if (result == NP_OK)
        until([] { return false; });
    return result < 0 ? result : failure_;
}

/* Wait, and compute what is asked for meanwhile. False: the step is over, or that failed. */
bool RowsAhead::until(const std::function<bool()> &is_so)
{
    for (;;) {
        Again *asked;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return is_over_ || again_ || is_so(); });
            asked = again_;
            again_ = nullptr;
            if (is_over_ || !asked)
                return !is_over_;
        }
        int result = np_engine_open_rows(engine_, &asked->place);
        if (result >= 0)
            result = np_engine_compute_product(engine_, asked->product, &asked->place, &asked->token, 1, asked->out, asked->stride);
        std::lock_guard<std::mutex> lock(mutex_);
        asked->is_done = true;
        failure_ = result < 0 ? result : failure_;
        changed_.notify_all();
        if (result < 0)
            return false;
    }
}

int RowsAhead::next(np_product_rows *place)
{
    for (;;) {
        uint64_t seen;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            seen = wanted_;
        }
        const int result = np_engine_next_rows(engine_, place);
        if (result != NP_ROWS_UNKNOWN)
            return result;
        if (!until([&] { return wanted_ != seen; }))
            return failure_;
    }
}

int RowsAhead::make(Made *made)
{
    const np_product_rows &from = made->place;
    const int matrices = from.kind == NP_PRODUCT_NEURONS ? 3 : 1;
    const size_t parts = (from.rows + PART_ROWS - 1) / PART_ROWS;
    std::atomic<bool> is_refused{made->scales[0].size() < from.rows || made->rows[0].size() < static_cast<size_t>(from.rows) * from.columns};
    if (is_refused)
        return NP_E_ARGUMENT;
    makers_.share(parts * static_cast<size_t>(matrices), [&](size_t part) {
        const size_t n = part / parts, first = part % parts * PART_ROWS, count = std::min<size_t>(PART_ROWS, from.rows - first);
        const int type = matrices == 3 && n == 0 ? shape_.trigger_type : shape_.type;
        if (np_rows_to_s8(type, from.quants[n] + first, from.scales[n] + first, count, from.columns,
                          made->rows[n].data() + first * from.columns, from.columns, made->scales[n].data() + first) < 0)
            is_refused = true;
    });
    if (is_refused)
        return NP_E_ARGUMENT;
    made->most = 1;
    if (matrices == 1)
        return NP_OK;
    for (std::vector<int8_t> &rows : made->rows)
        std::fill(rows.begin() + static_cast<ptrdiff_t>(from.rows) * from.columns, rows.end(), int8_t(0));
    std::vector<double> factors(neurons_);
    made->most = 0;
    for (uint32_t r = 0; r < from.rows; r++) {
        factors[r] = static_cast<double>(made->scales[0][r]) * made->scales[1][r] * made->scales[2][r];
        made->most = std::isnan(factors[r]) || std::isnan(made->most) ? NAN : std::max(made->most, factors[r]);
    }
    if (made->most != 0 && std::isfinite(made->most))
        std::transform(factors.begin(), factors.end(), made->factor.begin(),
                       [&](double f) { return to_integer(f / made->most, factor_.step, static_cast<double>(factor_.zero)); });
    return NP_OK;
}

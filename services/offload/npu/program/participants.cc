#include "participants.h"

#include <cstdio>
#include <cstring>
#include <sched.h>

Participants::Participants(Job &job, Products &products, uint32_t product_blocks) : job_(job), products_(products)
{
    const np_engine_config config = job.config(product_blocks);
    for (uint32_t n = 0; n < job.threads; n++) {
        const char *wrong = nullptr;
        const np_shared shared = job.shared(n);
        const np_fixed fixed = job.fixed();
        engines_.push_back(np_engine_create(&job.shape, &fixed, &shared, &config, &wrong));
        if (!engines_.back())
            run_fail(wrong ? wrong : "memory", wrong ? "the engine refuses it: it is out of its range, or contradicts another field"
                                                       : "the engine's private memory could not be allocated");
    }
}

/* Pin the thread to a core. Errors are ignored: the allowed cores may change, and an unpinned thread is only slower. */
static void pin(int core)
{
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (core < 0 || core >= CPU_SETSIZE)
        return;
    CPU_SET(core, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
}

int Participants::compute(np_step step)
{
    for (std::thread &thread : threads_)
        thread.join();
    threads_.clear();
    sequences_.assign(step.sequences, step.sequences + step.count);
    positions_.assign(step.positions, step.positions + step.count);
    tokens_.assign(step.tokens, step.tokens + step.count);
    step.sequences = sequences_.data();
    step.positions = positions_.data();
    step.tokens = tokens_.data();
    step.first_block = 0;
    step.end_block = job_.shape.blocks;
    step.participants = step.sharers = static_cast<uint32_t>(engines_.size());
    memset(job_.claims, 0, job_.claims_bytes);
    np_barrier_reset(job_.barrier);
    ended_ = 0;
    result_ = NP_OK;
    why_.clear();
    for (size_t n = 0; n < engines_.size(); n++)
        threads_.emplace_back(&Participants::work, this, n, step);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return ended_ == engines_.size() || result_ != NP_OK || !why_.empty(); });
    if (!why_.empty())
        throw RuntimeError(why_);
    return result_;
}

void Participants::work(size_t number, np_step step)
{
    np_engine *engine = engines_[number];
    np_engine_counters counters;
    np_product product;
    if (engines_.size() > 1 && number < job_.cores.size())
        pin(job_.cores[number]);
    np_engine_read_counters(engine, &counters); /* discards those of an abandoned step */
    step.participant = step.sharer = static_cast<uint32_t>(number);
    int result = np_engine_begin_external(engine, &step);
    const bool is_first = number == 0 && result >= 0;
    if (is_first)
        products_.begin(engine);
    try {
        while (result >= 0 && (result = np_engine_next_product(engine, &product)) == 1)
            result = products_.compute(product);
    } catch (const std::exception &error) {
        return end(NP_OK, error.what());
    }
    if (is_first)
        products_.end();
    if (result == NP_E_DAMAGED) {
        np_engine_read_counters(engine, &counters);
        std::lock_guard<std::mutex> lock(mutex_);
        damaged_word = counters.damaged_word;
        damaged_part = counters.damaged_part;
    }
    end(result, "");
}

/* Record how a participant ended. Another error replaces NP_E_EPOCH, with which participants leave because of it. */
void Participants::end(int result, const std::string &why)
{
    std::lock_guard<std::mutex> lock(mutex_);
    ended_++;
    if (result_ == NP_OK || (result_ == NP_E_EPOCH && result != NP_OK))
        result_ = result;
    if (why_.empty())
        why_ = why;
    changed_.notify_one();
}

std::map<std::string, double> Participants::counters()
{
    std::map<std::string, double> sums;
    for (np_engine *engine : engines_) {
        np_engine_counters c;
        np_engine_read_counters(engine, &c);
        const double ns_per_mean_ms = 1e6 * static_cast<double>(engines_.size());
        const std::pair<const char *, double> figures[] = {
            {"neurons", c.neurons}, {"predicted", c.predicted}, {"fired", c.fired}, {"active", c.active}, {"gate_rows", c.gate_rows},
            {"up_rows", c.up_rows}, {"down_rows", c.down_rows}, {"foreseen", c.foreseen}, {"foreseen_missed", c.foreseen_missed},
            {"guessed", c.guessed}, {"guessed_right", c.guessed_right}, {"hinted", c.hinted}, {"hinted_fired", c.hinted_fired},
            {"trigger_clusters", c.clusters[NP_TRIGGER]}, {"value_clusters", c.clusters[NP_VALUE]}, {"trigger_missed", c.missed[NP_TRIGGER]},
            {"value_missed", c.missed[NP_VALUE]}, {"step_ms", c.step_ns / ns_per_mean_ms}, {"flash_ms", c.flash_ns / ns_per_mean_ms}, {"barrier_ms", c.barrier_ns / ns_per_mean_ms}};
        for (const auto &figure : figures)
            sums[figure.first] += figure.second;
    }
    for (const auto &figure : products_.counters())
        sums.insert(figure);
    sums["flash_ms"] = std::min(sums["flash_ms"], sums["rows_wait_ms"] / static_cast<double>(engines_.size())); /* waiting for flash while graphs run does not count */
    return sums;
}

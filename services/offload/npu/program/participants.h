/* The participants of this process's steps: an engine and a thread each. The first one's thread computes the
 * products. */
#ifndef PARTICIPANTS_H
#define PARTICIPANTS_H
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "job.h"
#include "products.h"

class Participants {
public:
    /* Ends the run if the engine refuses the job's configuration. */
    Participants(Job &job, Products &products, uint32_t product_blocks);
    /* Compute a step; the caller sets its tokens and logits. Returns NP_OK, or an error of np_engine_step as soon as
     * one participant has it: the others end with the next epoch. Throws RuntimeError if the runtime fails; nothing can
     * be computed after that. */
    int compute(np_step step);
    /* The last step's counters, summed over the participants; times are means. Invalid after an error. */
    std::map<std::string, double> counters();
    int64_t damaged_word = -1; /* after NP_E_DAMAGED: the cluster, and its part */
    int32_t damaged_part = 0;

private:
    void work(size_t number, np_step step);
    void end(int result, const std::string &why);

    Job &job_;
    Products &products_;
    std::vector<np_engine *> engines_;
    std::vector<std::thread> threads_;
    /* the step's arrays: threads may still read them after an error */
    std::vector<int32_t> sequences_, positions_, tokens_;
    std::mutex mutex_;
    std::condition_variable changed_;
    size_t ended_;
    int result_;
    std::string why_;
};
#endif

/* The participants of this process's steps: an engine and a thread for each. The first one's thread has the products computed. */
#ifndef TEAM_H
#define TEAM_H
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "job.h"
#include "products.h"

class Team {
public:
    /* Ends the run when the engine refuses what the job says. */
    Team(Job &job, Products &products, uint32_t product_blocks);
    /* Computes a step whose tokens and logits are set; the rest is set here. Returns NP_OK or an error of np_engine_step, as soon as one participant
     * has it: the others end with the next epoch. Throws RuntimeError when the runtime fails: then nothing can be computed any more. */
    int compute(np_step step);
    /* Sums over the participants of what happened in the last step; of times the means. After an error nothing. */
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
    /* the step; arrays that threads go on reading after an error */
    std::vector<int32_t> sequences_, positions_, tokens_;
    std::mutex mutex_;
    std::condition_variable changed_;
    size_t ended_;
    int result_;
    std::string why_;
};
#endif

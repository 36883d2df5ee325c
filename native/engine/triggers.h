/* Triggers of the clusters of one block. */
#ifndef NP_TRIGGERS_H
#define NP_TRIGGERS_H
#include "engine/engine.h"

/* Look up the trigger parts, and request the absent ones. Returns the number of parts that are still absent, or an
 * error. */
int np_look_up_triggers(np_engine *engine, np_range clusters);
/* Compute the triggers of the clusters whose trigger parts are present. */
void np_compute_triggers(np_engine *engine, np_range clusters);

#endif

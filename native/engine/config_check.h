/* Validation of np_engine_create's arguments. */
#ifndef NP_CONFIG_CHECK_H
#define NP_CONFIG_CHECK_H
#include "engine/engine.h"

/* The name of the first field that is out of range or contradicts another one; NULL if all are valid. */
const char *np_invalid_field(const np_shape *shape, const np_fixed *fixed, const np_shared *shared, const np_engine_config *config);

#endif

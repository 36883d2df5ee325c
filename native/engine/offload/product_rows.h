/* The reader of the rows of external products. */
#ifndef NP_PRODUCT_ROWS_H
#define NP_PRODUCT_ROWS_H
#include "engine/engine.h"

/* Reset the reader of participant 0 for a new step; the first call creates it. Returns 0 if memory is short. */
int np_row_reader_begin(np_engine *engine);

#endif

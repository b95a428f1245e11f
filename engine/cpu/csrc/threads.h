/* Loops by several threads, or by the one that calls: entering OpenMP's region takes 0.6 us even where it is left to
   one thread, which a decode step of a small model would pay for seven times a layer. */
#ifndef TANDEM_THREADS_H
#define TANDEM_THREADS_H

#define PRAGMA(...) _Pragma(#__VA_ARGS__)

/* FOR_EACH(index, count, num_threads, body): equal shares of the loop for each thread. */
#define FOR_EACH(index, count, num_threads_, ...) \
    do { \
        const int for_each_threads = (num_threads_); \
        if (for_each_threads > 1) { \
            PRAGMA(omp parallel for num_threads(for_each_threads) schedule(static)) \
            for (int64_t index = 0; index < (count); index++) __VA_ARGS__ \
        } else { \
            for (int64_t index = 0; index < (count); index++) __VA_ARGS__ \
        } \
    } while (0)

#endif

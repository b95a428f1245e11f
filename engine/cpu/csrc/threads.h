/* Loops over several threads. With one thread, a loop stays outside OpenMP: entering a parallel region takes 0.6 us
   even for one thread, and a decode step has seven loops per layer. */
#ifndef TANDEM_THREADS_H
#define TANDEM_THREADS_H

#define PRAGMA(...) _Pragma(#__VA_ARGS__)

/* FOR_EACH(index, count, num_threads, body): gives each thread an equal share of the loop. */
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

/* A wall clock that is ahead of the machine's by the nanoseconds in the file $SHIFTED_CLOCK.

   Loaded by LD_PRELOAD. The file is mapped: a test that writes to it moves the clock of running
   processes. Clocks that only count up are left alone. What waits until a time of the wall clock
   gives the kernel that time on the machine's own clock; a condition variable that counts from the
   boot of the machine gives it a time below BOOTS. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define SECOND INT64_C(1000000000)
#define BOOTS 1000000000 /* 31 years in seconds */
#define TIME struct timespec
#define LIBC(name, ...)                                                                            \
    static __typeof__(&name) real;                                                                 \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name);                                  \
    return real(__VA_ARGS__)

static int64_t none;
static volatile int64_t *ahead_ns = &none;

__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *found = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) ahead_ns = found;
    if (file >= 0) close(file);
}

static TIME moved(TIME at, int64_t by_ns) {
    int64_t ns = at.tv_sec * SECOND + at.tv_nsec + by_ns;
    return (TIME){ns / SECOND, ns % SECOND};
}

static TIME machines(const TIME *at) { return at->tv_sec < BOOTS ? *at : moved(*at, -*ahead_ns); }

static int machine(clockid_t clock, TIME *at) { LIBC(clock_gettime, clock, at); }

int clock_gettime(clockid_t clock, TIME *at) {
    int failed = machine(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *at = moved(*at, *ahead_ns);
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    TIME now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *at = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *at) {
    TIME now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *on, pthread_mutex_t *held, const TIME *until) {
    TIME at = machines(until);
    LIBC(pthread_cond_timedwait, on, held, &at);
}

int cnd_timedwait(cnd_t *on, mtx_t *held, const TIME *until) {
    TIME at = machines(until);
    LIBC(cnd_timedwait, on, held, &at);
}

int sem_timedwait(sem_t *on, const TIME *until) {
    TIME at = machines(until);
    LIBC(sem_timedwait, on, &at);
}

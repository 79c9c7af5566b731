/* A CUDA runtime over host memory: what torch's own CUDA code calls, loaded before libcudart is.
 *
 * No kernel can be launched; kernels.py puts others in their place.  What the host must not rely on is
 * made visible: a copy from the GPU to pinned memory arrives at the next synchronisation, and reads 0xFF bytes
 * (NaN) until then; pinned memory that has changed under a copy to the GPU by then is a race.
 */
#define cudaStreamGetCaptureInfo declared_otherwise_by_every_version
#include <cuda_runtime_api.h>
#undef cudaStreamGetCaptureInfo
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef cudaError_t E;
typedef cudaStream_t S;
#define OK cudaSuccess
#define NEW(type, ...) ({ type *new_ = malloc(sizeof(type)); *new_ = (type){__VA_ARGS__}; new_; })

/* What the tests read and set. */
static size_t total, used;
static void (*see)(const char *);
long gpu_races, gpu_pinned, gpu_fail_malloc, gpu_settled;
void gpu_setup(size_t memory, void (*seen)(const char *)) { total = memory; see = seen; }
static void tell(const char *what) { if (see) see(what); }

static __thread E error;
static E fail(E why) { return error = why; }
E cudaGetLastError(void) { E e = error; error = OK; return e; }
E cudaPeekAtLastError(void) { return error; }

/* Memory of the GPU, and pinned memory. */
typedef struct block { char *start; size_t size; int pinned; struct block *next; } block;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;

static block *owner(const void *p) {
    block *b = blocks;
    while (b && ((char *)p < b->start || (char *)p >= b->start + b->size)) b = b->next;
    return b;
}
static E take(void **p, size_t size, int pinned) {
    pthread_mutex_lock(&lock);
    int full = !pinned && (used + size > total || (gpu_fail_malloc && !--gpu_fail_malloc));
    if (!full) {
        if (posix_memalign(p, 512, size ? size : 1)) abort();
        memset(*p, 0xFF, size);
        blocks = NEW(block, *p, size, pinned, blocks);
        *(pinned ? (size_t *)&gpu_pinned : &used) += size;
    }
    pthread_mutex_unlock(&lock);
    return full ? fail(cudaErrorMemoryAllocation) : OK;
}
static E drop(void *p) {
    pthread_mutex_lock(&lock);
    block **at = &blocks, *b;
    while (*at && (*at)->start != p) at = &(*at)->next;
    if ((b = *at)) {
        *at = b->next;
        *(b->pinned ? (size_t *)&gpu_pinned : &used) -= b->size;
        free(b->start); free(b);
    }
    pthread_mutex_unlock(&lock);
    return OK;
}
E cudaMalloc(void **p, size_t n) { return take(p, n, 0); }
E cudaFree(void *p) { return drop(p); }
E cudaHostAlloc(void **p, size_t n, unsigned flags) { return take(p, n, 1); }
E cudaMemGetInfo(size_t *left, size_t *all) { *left = total - used; *all = total; return OK; }
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    pthread_mutex_lock(&lock);
    block *b = owner(p);
    a->type = !b ? cudaMemoryTypeUnregistered : b->pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Copies on their way, and waits for them. */
typedef struct copy { char *host, *bytes; size_t size; int to_host; struct copy *next; } copy;
static copy *first, **last = &first;
static int queries;

static void settle(void) {
    int raced = 0;
    pthread_mutex_lock(&lock);
    for (copy *c = first, *next; c; c = next) {
        size_t i = 0;
        if (c->to_host) {
            while (i < c->size && c->host[i] == (char)0xFF) i++;
            raced |= i < c->size;
            memcpy(c->host, c->bytes, c->size);
        } else raced |= memcmp(c->host, c->bytes, c->size) != 0;
        next = c->next; free(c->bytes); free(c);
    }
    first = NULL; last = &first; queries = 0; gpu_races += raced; gpu_settled++;
    pthread_mutex_unlock(&lock);
    if (raced) tell("race");
}
E cudaFreeHost(void *p) { settle(); return drop(p); }
static E wait_for(const char *what) { settle(); tell(what); return OK; }
E cudaStreamSynchronize(S s) { return wait_for("cudaStreamSynchronize"); }
E cudaEventSynchronize(cudaEvent_t e) { return wait_for("cudaEventSynchronize"); }
E cudaDeviceSynchronize(void) { settle(); return OK; }
/* not at once, or the pinned allocator, which asks often, would settle what the program does not */
static E done(void) {
    if (first && ++queries % 8) return cudaErrorNotReady;
    settle(); return OK;
}
E cudaEventQuery(cudaEvent_t e) { return done(); }
E cudaStreamQuery(S s) { return done(); }

static void move(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, int waits) {
    pthread_mutex_lock(&lock);
    int to_host = kind == cudaMemcpyDeviceToHost;
    block *host = to_host || kind == cudaMemcpyHostToDevice ? owner(to_host ? to : from) : NULL;
    if (!waits && host && host->pinned && size) {
        copy *c = NEW(copy, to_host ? to : (void *)from, malloc(size), size, to_host);
        memcpy(c->bytes, from, size);
        if (to_host) memset(to, 0xFF, size); else memcpy(to, from, size);
        *last = c; last = &c->next;
    } else memmove(to, from, size);
    pthread_mutex_unlock(&lock);
}

E cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, S s) {
    move(to, from, n, k, 0); return OK;
}
E cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
    wait_for("cudaMemcpy"); move(to, from, n, k, 1); return OK;
}
E cudaMemsetAsync(void *p, int v, size_t n, S s) { memset(p, v, n); return OK; }
E cudaMemset(void *p, int v, size_t n) { memset(p, v, n); return OK; }
/* nothing is ever captured in a graph */
E cudaStreamIsCapturing(S s, enum cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; return OK; }
E cudaStreamGetCaptureInfo(S s, enum cudaStreamCaptureStatus *c, unsigned long long *id, void *g) {
    *c = cudaStreamCaptureStatusNone; return OK;
}
E cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return OK; }

/* One GPU, whose streams and events are mere handles. */
E cudaGetDeviceCount(int *n) { *n = 1; return OK; }
E cudaGetDevice(int *d) { *d = 0; return OK; }
E cudaSetDevice(int d) { return d ? fail(cudaErrorInvalidDevice) : OK; }
E cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return OK; }
E cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return OK; }
E cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return OK; }
E cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -1; return OK; }
E cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = 0; return OK; }
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    *p = (struct cudaDeviceProp){.totalGlobalMem = total, .major = 9, .multiProcessorCount = 132, .warpSize = 32,
        .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048, .regsPerMultiprocessor = 65536,
        .regsPerBlock = 65536, .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472, .l2CacheSize = 52428800, .unifiedAddressing = 1,
        .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535}};
    strcpy(p->name, "Simulated GPU");
    memcpy(p->uuid.bytes, "simulated-gpu-00", 16);
    return OK;
}
static E handle(void **p) { *p = malloc(64); return OK; }
E cudaStreamCreate(S *s) { return handle((void **)s); }
E cudaStreamCreateWithFlags(S *s, unsigned f) { return handle((void **)s); }
E cudaStreamCreateWithPriority(S *s, unsigned f, int p) { return handle((void **)s); }
E cudaStreamDestroy(S s) { free(s); return OK; }
E cudaStreamWaitEvent(S s, cudaEvent_t e, unsigned f) { return OK; }
E cudaStreamGetPriority(S s, int *p) { *p = 0; return OK; }
E cudaEventCreate(cudaEvent_t *e) { return handle((void **)e); }
E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return handle((void **)e); }
E cudaEventDestroy(cudaEvent_t e) { free(e); return OK; }
E cudaEventRecordWithFlags(cudaEvent_t e, S s, unsigned f) { clock_gettime(CLOCK_MONOTONIC, (struct timespec *)e); return OK; }
E cudaEventRecord(cudaEvent_t e, S s) { return cudaEventRecordWithFlags(e, s, 0); }
E cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    struct timespec *from = (void *)a, *to = (void *)b;
    *ms = (to->tv_sec - from->tv_sec) * 1e3f + (to->tv_nsec - from->tv_nsec) * 1e-6f;
    return OK;
}
static E no_kernels(void) { tell("launch"); return fail(cudaErrorInvalidDeviceFunction); }
E cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, S s) { return no_kernels(); }
E cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return no_kernels(); }

/* Of the driver (this library is named libcuda.so.1), what torch looks up by name. */
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = &lock; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
#define ABSENT(name) int name() { return 100; }
ABSENT(cuDeviceGetAttribute) ABSENT(cuDevicePrimaryCtxRetain) ABSENT(cuFuncGetAttribute) ABSENT(cuFuncSetAttribute)
ABSENT(cuFuncSetCacheConfig) ABSENT(cuGetErrorString) ABSENT(cuLaunchCooperativeKernel) ABSENT(cuLaunchKernel)
ABSENT(cuLinkAddData_v2) ABSENT(cuLinkComplete) ABSENT(cuLinkCreate_v2) ABSENT(cuModuleGetFunction)
ABSENT(cuModuleLoad) ABSENT(cuModuleLoadData) ABSENT(cuModuleLoadDataEx) ABSENT(cuModuleUnload)
ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor) ABSENT(cuPointerGetAttribute) ABSENT(cuTensorMapEncodeTiled)

/* A stand-in for libnvidia-ml.so.1: the calls that unisono makes, answered from the environment.

   STAND_IN_GPUS=8         how many GPUs there are
   STAND_IN_FREE=16,2,...  free memory of each in GiB; each has 16 (GPU 1 of a mixed machine: 24)
   STAND_IN_MIXED=1        GPU 1 is of another make
   STAND_IN_LOST=3         this GPU does not answer at all
   STAND_IN_LOST_IF=path   it answers as long as there is no such file
   STAND_IN_FAILING=2      this one fails when it is asked for its memory
   STAND_IN_HELD=1:4711    process 4711 computes on GPU 1, in 1 GiB
   STAND_IN_NO_DRIVER=1    the library is there, the driver is not loaded
   STAND_IN_MISMATCH=1     the library is of another version than the kernel module
   STAND_IN_CUDA=12040     the newest CUDA that the driver supports
   STAND_IN_MIG=0:2        GPU 0 is split into 2 MIG devices of 4 GiB
   STAND_IN_CORES=4        each GPU is near so many cores: GPU 0 to the first, GPU 1 to the next

   GPU 7 supports no reading of its utilisation and power. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7, NO_DRIVER = 9, LOST = 15,
       MISMATCH = 18, NOT_FOUND = 6,
       UNKNOWN = 999 };

static const unsigned long long GIB = 1ull << 30;

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } Process;

static int number(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

static int index_of(void *device) { return (int)((char *)device - (char *)0) - 1; }

/* A MIG device is numbered 1000 + 100 * its GPU + its place. */
static int is_part(int i) { return i >= 1000; }
static int gpu_of(int i) { return is_part(i) ? (i - 1000) / 100 : i; }

static int num_parts(int i) {
  int gpu = -1, count = 0;
  const char *text = getenv("STAND_IN_MIG");
  if (text) sscanf(text, "%d:%d", &gpu, &count);
  return gpu == i ? count : 0;
}

static int is_other_make(int i) { return number("STAND_IN_MIXED", 0) && i == 1; }

static int is_lost(int i) {
  const char *path = getenv("STAND_IN_LOST_IF");
  return i == number("STAND_IN_LOST", -1) && (!path || access(path, F_OK) == 0);
}

static int answer(char *buffer, unsigned int length, const char *text) {
  if (strlen(text) + 1 > length) return TOO_SMALL;
  strcpy(buffer, text);
  return OK;
}

int nvmlInitWithFlags(unsigned int flags) {
  if (number("STAND_IN_MISMATCH", 0)) return MISMATCH;
  return number("STAND_IN_NO_DRIVER", 0) ? NO_DRIVER : OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "Unknown Error"; }

int nvmlSystemGetDriverVersion(char *buffer, unsigned int length) {
  return answer(buffer, length, "570.00");
}

int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = number("STAND_IN_CUDA", 12080);
  return OK;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
  *count = number("STAND_IN_GPUS", 0);
  return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **device) {
  if ((int)i >= number("STAND_IN_GPUS", 0)) return INVALID;
  if (is_lost((int)i)) return LOST;
  *device = (char *)0 + i + 1;
  return OK;
}

int nvmlDeviceGetName(void *device, char *buffer, unsigned int length) {
  if (is_part(index_of(device))) return answer(buffer, length, "Stand-in A MIG 1g.4gb");
  return answer(buffer, length, is_other_make(index_of(device)) ? "Stand-in B" : "Stand-in A");
}

int nvmlDeviceGetUUID(void *device, char *buffer, unsigned int length) {
  char text[80];
  /* The first two begin alike, so that there is a prefix that means both. */
  int i = index_of(device);
  if (is_part(i)) {
    snprintf(text, sizeof text, "MIG-%08x-0000-0000-0000-%012d", 0xcc00 + i % 100, i);
    return answer(buffer, length, text);
  }
  snprintf(text, sizeof text, "GPU-%08x-0000-0000-0000-%012d", i < 2 ? 0xaa00 + i : 0xbb0000 + i,
           i);
  return answer(buffer, length, text);
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
  int i = index_of(device);
  if (i == number("STAND_IN_FAILING", -1)) return UNKNOWN;
  if (is_part(i)) {
    memory->total = memory->free = 4 * GIB;
    memory->used = 0;
    return OK;
  }
  memory->total = (is_other_make(i) ? 24 : 16) * GIB;
  memory->free = memory->total;
  const char *text = getenv("STAND_IN_FREE");
  for (int skip = i; text && skip > 0; skip--) {
    text = strchr(text, ',');
    if (text) text++;
  }
  if (text && *text) memory->free = strtoull(text, NULL, 10) * GIB;
  memory->used = memory->total - memory->free;
  return OK;
}

int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
  if (index_of(device) == 7 || is_part(index_of(device))) return NOT_SUPPORTED;
  rates->gpu = 10 * index_of(device);
  rates->memory = 0;
  return OK;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
  if (is_part(index_of(device))) return NOT_SUPPORTED;
  *celsius = 40 + index_of(device);
  return OK;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
  if (index_of(device) == 7 || is_part(index_of(device))) return NOT_SUPPORTED;
  *milliwatts = 100000 + 10500 * index_of(device);
  return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, Process *found) {
  int gpu = -1, pid = 0;
  const char *text = getenv("STAND_IN_HELD");
  if (text) sscanf(text, "%d:%d", &gpu, &pid);
  if (gpu != index_of(device)) {
    *count = 0;
    return OK;
  }
  if (*count < 1) {
    *count = 1;
    return TOO_SMALL;
  }
  *count = 1;
  found[0].pid = pid;
  found[0].used = GIB;
  found[0].gi = found[0].ci = 0xFFFFFFFF;
  return OK;
}

int nvmlDeviceGetMigMode(void *device, unsigned int *current, unsigned int *pending) {
  *current = *pending = num_parts(index_of(device)) > 0;
  return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned int *count) {
  *count = 7;
  return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned int i, void **part) {
  if ((int)i >= num_parts(index_of(device))) return NOT_FOUND;
  *part = (char *)0 + 1001 + 100 * index_of(device) + i;
  return OK;
}

int nvmlDeviceGetCpuAffinity(void *device, unsigned int length, unsigned long long *words) {
  int count = number("STAND_IN_CORES", 0), first = count * gpu_of(index_of(device));
  if (!count) return NOT_SUPPORTED;
  memset(words, 0, length * sizeof *words);
  for (int core = first; core < first + count && core < (int)length * 64; core++)
    words[core / 64] |= 1ull << (core % 64);
  return OK;
}

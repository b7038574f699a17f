#pragma once

// Marks the symbols that the shared library exports; all others are hidden.
#define SHARDSTEP_API __attribute__((visibility("default")))

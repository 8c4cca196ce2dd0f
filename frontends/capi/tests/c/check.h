/* What the C tests share: a check that tells where it failed, and the last message of the library. */
#ifndef QUINION_CHECK_H
#define QUINION_CHECK_H

#include <quinion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program if a condition does not hold; also where NDEBUG is set. */
#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s does not hold; the last message: %s\n", __FILE__, __LINE__, #condition, \
                qn_error_message()); \
            exit(1); \
        } \
    } while (0)

/* A call returns an error, and the message has some words. */
#define FAILS(call, errno_, words) \
    do { \
        long long answer_ = (long long)(call); \
        if (answer_ != -(errno_) || !strstr(qn_error_message(), words)) { \
            fprintf(stderr, "%s:%d: %s is %lld with \"%s\"; expected %d with \"%s\"\n", __FILE__, __LINE__, #call, \
                answer_, qn_error_message(), -(errno_), words); \
            exit(1); \
        } \
    } while (0)

#endif

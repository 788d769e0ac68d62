// The model of codes that ecsq is coded by (ecsq.h): how often of 4096 a code of magnitude 0, 1, ... is either of its
// signs, for coordinates whose deviation is 2^(i / 4) steps, i from -9 to 8 by row, and how much nearer to 0 than its
// code the mean of what has it is, in steps / 256. Of Student's t with 8 degrees of freedom; the borders between
// codes are those of the least squared error + 0.1155 bits. Frequency 0: by an escape, which has what is left.
//
// The numbers are part of the format. The program that made them is not kept: they are near to what the above gives
// and not the same everywhere. What a context costs more than the entropy of its distribution, and how far its values
// are from the means, ecsq_test.c measures.
//
// Included by ecsq_tables.c alone.
#ifndef QKV_ENGINE_CODEC_ECSQ_LADDER_H
#define QKV_ENGINE_CODEC_ECSQ_LADDER_H

#include <stdint.h>

#define QKVI_ECSQ_CONTEXTS 18
#define QKVI_ECSQ_LEAST (-9)
#define QKVI_ECSQ_HALF 15

// clang-format off
static const uint16_t ladder[QKVI_ECSQ_CONTEXTS][QKVI_ECSQ_HALF + 1] = {
    {4093, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {4089, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {4077, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {4021, 37, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {3837, 128, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {3477, 303, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {3011, 521, 20, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {2559, 712, 52, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {2157, 851, 105, 11, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {1819, 922, 182, 28, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {1541, 937, 268, 56, 12, 3, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {1301, 908, 352, 100, 27, 7, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0},
    {1099, 848, 417, 155, 52, 17, 6, 2, 1, 0, 0, 0, 0, 0, 0, 0},
    {931, 771, 454, 211, 87, 35, 14, 6, 2, 1, 1, 0, 0, 0, 0, 0},
    {786, 685, 465, 260, 130, 61, 28, 13, 6, 3, 2, 1, 0, 0, 0, 0},
    {668, 602, 451, 291, 171, 93, 50, 26, 14, 7, 4, 2, 1, 1, 0, 0},
    {563, 522, 423, 305, 204, 127, 77, 45, 26, 15, 9, 5, 3, 2, 1, 1},
    {476, 448, 384, 302, 224, 156, 105, 69, 44, 28, 18, 11, 7, 5, 3, 2},
};

static const int8_t shifts[QKVI_ECSQ_CONTEXTS][QKVI_ECSQ_HALF + 1] = {
    {0, -39, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, -48, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, -27, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, -2, -39, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 14, -19, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 21, 0, -12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 21, 10, -4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 19, 13, 1, -6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 14, 14, 5, -3, -5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 10, 10, 4, -3, -6, -5, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 6, 6, 2, -3, -6, -7, -5, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 3, 2, -1, -4, -6, -7, -8, -5, 0, 0, 0, 0, 0, 0, 0},
    {0, -1, -2, -5, -7, -8, -8, -9, -9, -9, -6, 0, 0, 0, 0, 0},
    {0, -3, -6, -8, -9, -9, -9, -10, -10, -11, -11, -10, 0, 0, 0, 0},
    {0, -5, -9, -12, -12, -12, -12, -12, -12, -12, -13, -13, -13, -12, 0, 0},
    {0, -7, -12, -14, -15, -15, -15, -14, -14, -14, -14, -14, -15, -13, -8, 2},
    {0, -7, -13, -16, -18, -18, -17, -16, -16, -16, -16, -16, -16, -14, -9, 1},
};
// clang-format on

#endif

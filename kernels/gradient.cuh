// What the backward kernels share about weight gradients.
#pragma once

// Rows whose weight gradients are added one after another in registers. Equal terms round the same
// way each time: 248 of them in sequence lost 31 units in the last place, 64 lose 8.
constexpr int kTurns = 64;

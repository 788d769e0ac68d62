# Draws docs/quality.svg from the CSV files in this directory: KL over bits per coordinate.
# Usage, from the top of the repository: gnuplot tests/regress/quality.gp
set datafile separator ","
set terminal svg size 900,640 enhanced font "sans-serif,13" background "white"
# Without the tabs and trailing blanks that gnuplot writes.
set output "| expand -t 1 | sed 's/ *$//' > docs/quality.svg"
# Without calibrated codes that have anchors on top, which lie all but upon those that have none; tiers apart.
ours = "< grep -v -e 'KLT.*best anchor' -e low-rank -e 'by attention' tests/regress/quality.csv"
tiers = "< grep 'by attention' tests/regress/quality.csv"
theirs = "tests/regress/baselines.csv"

# The rows of a scheme: names that begin with `text`.
begins(text) = strstrt(strcol(1), text) == 1
bits(text) = begins(text) ? column(2) : NaN

set title "Divergence of the next-byte distribution over bits per coordinate, all in (tinylm, 32 windows)"
set xlabel "bits per coordinate of K and V, all in"
set ylabel "KL (bits), exact against coded cache"
set logscale y
set format y "%.0e"
set xrange [0.9:5.2]
set yrange [6e-5:6e-2]
set grid
set key top right
set datafile missing NaN

plot \
  theirs using (bits("KIVI")):5 every ::1 with linespoints lc "#999999" pt 4 title "KIVI 4, 3, 2", \
  theirs using (bits("TurboQuant-MSE")):5 every ::1 with linespoints lc "#777777" pt 6 title "TurboQuant-MSE 5 to 1", \
  theirs using (bits("PolarQuant")):5 every ::1 with linespoints lc "#bbaa88" pt 8 title "PolarQuant 5 to 2", \
  theirs using (bits("ggml q4\_0")):5 every ::1 with points lc "black" pt 3 title "ggml q4\\_0", \
  theirs using (bits("attend frame")):5 every ::1 with points lc "#99bbee" pt 1 title "prototype, attend frame", \
  theirs using (bits("archive frame")):5 every ::1 with points lc "#eebb99" pt 1 title "prototype, archive frame", \
  ours using (bits("best anchor")):5 every ::1 with linespoints lc "#44aa44" lw 2 pt 5 title "data-free, best anchor", \
  ours using (bits("attend frame")):5 every ::1 with linespoints lc "#2255cc" lw 2 pt 7 title "attend frame, calibrated", \
  ours using (bits("archive frame: pre-RoPE KLT")):5 every ::1 with linespoints lc "#cc4411" lw 2 pt 9 \
    title "archive frame, calibrated", \
  tiers using (bits("attend frame")):5 every ::0 with linespoints lc "#2255cc" dt 2 pt 6 \
    title "attend frame, from 4 bits by attention"

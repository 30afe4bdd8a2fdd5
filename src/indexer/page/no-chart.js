/* Served as /ui/chart.js by a build without Chart.js (Debian: libjs-chart.js): charts.js says so. */

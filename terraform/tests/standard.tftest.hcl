# The real provider with keys that open nothing: it renders every policy while planning, offline.
provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = data.aws_caller_identity.current
  values = { account_id = "111122223333" }
}

run "standard" {
  command = plan

  variables {
    name   = "cache"
    prefix = "team/s3kv"
    tags   = { Team = "inference" }
    pod_identities = {
      engine = { cluster_name = "gpu", namespace = "inference", service_account = "vllm" }
    }
    irsa = {
      canary = {
        oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/ABC"
        namespace         = "inference"
        service_account   = "canary"
        access            = "reader"
      }
    }
    permissions_boundary_arn = "arn:aws:iam::111122223333:policy/boundary"
    gateway_endpoint = {
      vpc_id             = "vpc-1"
      route_table_ids    = ["rtb-1", "rtb-2"]
      extra_bucket_names = ["models", "al2023-repos-*"]
    }
    alarm_actions  = ["arn:aws:sns:eu-west-1:111122223333:pager"]
    max_bucket_gib = 100
  }

  # --- the bucket

  assert {
    condition     = length(aws_s3_bucket.this) == 1 && length(aws_s3_directory_bucket.this) == 0
    error_message = "there must be a general purpose bucket and no other"
  }

  assert {
    condition     = aws_s3_bucket.this[0].bucket == "cache" && aws_s3_bucket.this[0].force_destroy == true
    error_message = "the bucket must have its name, and be destroyed with what is in it"
  }

  assert {
    condition = aws_s3_bucket.this[0].tags == tomap({
      Application = "s3kv"
      ManagedBy   = "terraform"
      DataClass   = "recomputable-cache"
      Team        = "inference"
    })
    error_message = "the bucket must carry the module's tags and the caller's"
  }

  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.this[0].block_public_acls,
      aws_s3_bucket_public_access_block.this[0].block_public_policy,
      aws_s3_bucket_public_access_block.this[0].ignore_public_acls,
      aws_s3_bucket_public_access_block.this[0].restrict_public_buckets,
    ])
    error_message = "all four kinds of public access must be blocked"
  }

  assert {
    condition     = aws_s3_bucket_ownership_controls.this[0].rule[0].object_ownership == "BucketOwnerEnforced"
    error_message = "there must be no ACLs"
  }

  assert {
    condition = [for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : {
      algorithm  = rule.apply_server_side_encryption_by_default[0].sse_algorithm
      bucket_key = rule.bucket_key_enabled
    }] == [{ algorithm = "AES256", bucket_key = false }]
    error_message = "encryption must be SSE-S3"
  }

  assert {
    condition = jsonencode([for rule in aws_s3_bucket_lifecycle_configuration.this.rule : [
      rule.id, rule.status, [for filter in rule.filter : filter.prefix == null ? "" : filter.prefix], rule.expiration[*].days, rule.abort_incomplete_multipart_upload[*].days_after_initiation,
      ]]) == jsonencode([
      ["expire", "Enabled", ["team/s3kv/"], [7], []],
      ["abort-multipart", "Enabled", [""], [], [1]],
    ])
    error_message = "what is under the prefix must expire after 7 days, unfinished uploads anywhere after 1"
  }

  # --- the policies, whole

  assert {
    condition = jsondecode(aws_s3_bucket_policy.this.policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "DenyWithoutTls"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:*"
          Resource  = ["arn:aws:s3:::cache/*", "arn:aws:s3:::cache"]
          Condition = { Bool = { "aws:SecureTransport" = "false" } }
        },
        {
          Sid       = "DenyOldTls"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:*"
          Resource  = ["arn:aws:s3:::cache/*", "arn:aws:s3:::cache"]
          Condition = { NumericLessThan = { "s3:TlsVersion" = "1.2" } }
        },
        {
          Sid       = "DenyWrongEncryption"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:PutObject"
          Resource  = "arn:aws:s3:::cache/*"
          Condition = {
            Null            = { "s3:x-amz-server-side-encryption" = "false" }
            StringNotEquals = { "s3:x-amz-server-side-encryption" = "AES256" }
          }
        },
      ]
    }
    error_message = "bucket policy: ${aws_s3_bucket_policy.this.policy}"
  }

  assert {
    condition = jsondecode(aws_iam_policy.access["reader"].policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "List"
          Effect    = "Allow"
          Action    = "s3:ListBucket"
          Resource  = "arn:aws:s3:::cache"
          Condition = { StringLikeIfExists = { "s3:prefix" = "team/s3kv/*" } }
        },
        {
          Sid      = "Objects"
          Effect   = "Allow"
          Action   = "s3:GetObject"
          Resource = "arn:aws:s3:::cache/team/s3kv/*"
        },
      ]
    }
    error_message = "reader: ${aws_iam_policy.access["reader"].policy}"
  }

  assert {
    condition = jsondecode(aws_iam_policy.access["writer"].policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "List"
          Effect    = "Allow"
          Action    = "s3:ListBucket"
          Resource  = "arn:aws:s3:::cache"
          Condition = { StringLikeIfExists = { "s3:prefix" = "team/s3kv/*" } }
        },
        {
          Sid      = "Objects"
          Effect   = "Allow"
          Action   = ["s3:PutObject", "s3:GetObject", "s3:DeleteObject"]
          Resource = "arn:aws:s3:::cache/team/s3kv/*"
        },
      ]
    }
    error_message = "writer: ${aws_iam_policy.access["writer"].policy}"
  }

  assert {
    condition     = keys(aws_iam_policy.access) == ["reader", "writer"]
    error_message = "there must be these two policies and no other"
  }

  assert {
    condition = jsondecode(aws_vpc_endpoint.this[0].policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "List"
          Effect    = "Allow"
          Principal = "*"
          Action    = "s3:ListBucket"
          Resource  = "arn:aws:s3:::cache"
        },
        {
          Sid       = "Objects"
          Effect    = "Allow"
          Principal = "*"
          Action    = ["s3:PutObject", "s3:GetObject", "s3:DeleteObject"]
          Resource  = "arn:aws:s3:::cache/team/s3kv/*"
        },
        {
          Sid       = "ImageLayers"
          Effect    = "Allow"
          Principal = "*"
          Action    = "s3:GetObject"
          Resource  = "arn:aws:s3:::prod-eu-west-1-starport-layer-bucket/*"
        },
        {
          Sid       = "ExtraBuckets"
          Effect    = "Allow"
          Principal = "*"
          Action    = ["s3:ListBucket", "s3:GetObject"]
          Resource = [
            "arn:aws:s3:::models/*",
            "arn:aws:s3:::models",
            "arn:aws:s3:::al2023-repos-*/*",
            "arn:aws:s3:::al2023-repos-*",
          ]
        },
      ]
    }
    error_message = "endpoint: ${aws_vpc_endpoint.this[0].policy}"
  }

  assert {
    condition = jsondecode(aws_iam_role.eks["engine"].assume_role_policy) == {
      Version = "2012-10-17"
      Statement = [{
        Effect    = "Allow"
        Principal = { Service = "pods.eks.amazonaws.com" }
        Action    = ["sts:TagSession", "sts:AssumeRole"]
        Condition = {
          StringEquals = {
            "aws:RequestTag/eks-cluster-arn"            = "arn:aws:eks:eu-west-1:111122223333:cluster/gpu"
            "aws:RequestTag/kubernetes-namespace"       = "inference"
            "aws:RequestTag/kubernetes-service-account" = "vllm"
          }
        }
      }]
    }
    error_message = "trust by Pod Identity: ${aws_iam_role.eks["engine"].assume_role_policy}"
  }

  assert {
    condition = jsondecode(aws_iam_role.eks["canary"].assume_role_policy) == {
      Version = "2012-10-17"
      Statement = [{
        Effect    = "Allow"
        Principal = { Federated = "arn:aws:iam::111122223333:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/ABC" }
        Action    = "sts:AssumeRoleWithWebIdentity"
        Condition = {
          StringEquals = {
            "oidc.eks.eu-west-1.amazonaws.com/id/ABC:aud" = "sts.amazonaws.com"
            "oidc.eks.eu-west-1.amazonaws.com/id/ABC:sub" = "system:serviceaccount:inference:canary"
          }
        }
      }]
    }
    error_message = "trust by IRSA: ${aws_iam_role.eks["canary"].assume_role_policy}"
  }

  # --- roles, network

  assert {
    condition = { for name, role in aws_iam_role.eks : name => [role.name, role.permissions_boundary] } == {
      engine = ["cache-engine", "arn:aws:iam::111122223333:policy/boundary"]
      canary = ["cache-canary", "arn:aws:iam::111122223333:policy/boundary"]
    }
    error_message = "there must be one role for each identity, within the boundary"
  }

  assert {
    condition = { for name, role in aws_iam_role.eks : name => role.description } == {
      engine = "s3kv as a writer of cache"
      canary = "s3kv as a reader of cache"
    }
    error_message = "each role must have the access that was asked for"
  }

  assert {
    condition = [for association in values(aws_eks_pod_identity_association.this) :
      [association.cluster_name, association.namespace, association.service_account]
    ] == [["gpu", "inference", "vllm"]]
    error_message = "Pod Identity must be associated with the service account"
  }

  assert {
    condition = [
      aws_vpc_endpoint.this[0].service_name,
      aws_vpc_endpoint.this[0].vpc_endpoint_type,
      aws_vpc_endpoint.this[0].vpc_id,
      join(" ", sort(aws_vpc_endpoint.this[0].route_table_ids)),
    ] == ["com.amazonaws.eu-west-1.s3", "Gateway", "vpc-1", "rtb-1 rtb-2"]
    error_message = "the endpoint must be S3's gateway in these route tables"
  }

  # --- monitoring

  assert {
    condition     = aws_s3_bucket_metric.this[0].name == "EntireBucket"
    error_message = "request metrics must be on"
  }

  assert {
    condition = {
      for alarm in [one(aws_cloudwatch_metric_alarm.errors), one(aws_cloudwatch_metric_alarm.latency), one(aws_cloudwatch_metric_alarm.size)] :
      alarm.alarm_name => [alarm.metric_name, coalesce(alarm.statistic, alarm.extended_statistic), alarm.threshold, alarm.comparison_operator, alarm.treat_missing_data, alarm.period]
      } == {
      cache-errors  = ["5xxErrors", "Average", 0.01, "GreaterThanThreshold", "notBreaching", 300]
      cache-latency = ["FirstByteLatency", "p99", 500, "GreaterThanThreshold", "notBreaching", 300]
      cache-size    = ["BucketSizeBytes", "Average", 107374182400, "GreaterThanThreshold", "ignore", 86400]
    }
    error_message = "the alarms must watch the errors, the latency and the size"
  }

  assert {
    condition = alltrue([
      for alarm in [aws_cloudwatch_metric_alarm.errors[0], aws_cloudwatch_metric_alarm.latency[0], aws_cloudwatch_metric_alarm.size[0]] :
      alarm.alarm_actions == toset(["arn:aws:sns:eu-west-1:111122223333:pager"]) && alarm.ok_actions == alarm.alarm_actions && alarm.namespace == "AWS/S3"
    ])
    error_message = "every alarm must reach the pager, and say when it is over"
  }

  assert {
    condition = [
      aws_cloudwatch_metric_alarm.errors[0].dimensions,
      aws_cloudwatch_metric_alarm.latency[0].dimensions,
      aws_cloudwatch_metric_alarm.size[0].dimensions,
      ] == [
      tomap({ BucketName = "cache", FilterId = "EntireBucket" }),
      tomap({ BucketName = "cache", FilterId = "EntireBucket" }),
      tomap({ BucketName = "cache", StorageType = "StandardStorage" }),
    ]
    error_message = "the alarms must look at this bucket"
  }

  assert {
    condition = [for widget in jsondecode(aws_cloudwatch_dashboard.this[0].dashboard_body).widgets : join(" ", [for metric in widget.properties.metrics : metric[1]])] == [
      "GetRequests PutRequests HeadRequests ListRequests DeleteRequests",
      "5xxErrors 4xxErrors",
      "FirstByteLatency",
      "BytesDownloaded BytesUploaded",
      "BucketSizeBytes",
      "NumberOfObjects",
    ]
    error_message = "the dashboard must have its six widgets"
  }

  # --- what vLLM is given

  assert {
    condition = jsondecode(output.kv_transfer_config) == {
      kv_connector              = "S3KVConnector"
      kv_connector_module_path  = "s3kv.connectors"
      kv_role                   = "kv_both"
      kv_connector_extra_config = { bucket = "cache", prefix = "team/s3kv", region = "eu-west-1", refresh_after_s = 151200 }
    }
    error_message = "kv_transfer_config: ${output.kv_transfer_config}"
  }

  assert {
    condition = jsondecode(output.ec_transfer_config) == {
      ec_connector              = "S3ECConnector"
      ec_connector_module_path  = "s3kv.connectors"
      ec_role                   = "ec_both"
      ec_connector_extra_config = { bucket = "cache", prefix = "team/s3kv", region = "eu-west-1", refresh_after_s = 151200 }
    }
    error_message = "ec_transfer_config: ${output.ec_transfer_config}"
  }

  assert {
    condition     = jsondecode(output.reader_kv_transfer_config).kv_role == "kv_consumer" && jsondecode(output.reader_ec_transfer_config).ec_role == "ec_consumer"
    error_message = "a reader's engine must not try to save"
  }

  assert {
    condition     = jsondecode(output.reader_kv_transfer_config).kv_connector_extra_config == { bucket = "cache", prefix = "team/s3kv", region = "eu-west-1" } && jsondecode(output.reader_ec_transfer_config).ec_connector_extra_config == { bucket = "cache", prefix = "team/s3kv", region = "eu-west-1" }
    error_message = "a reader's engine must not try to refresh what it may not write"
  }
}

run "bare" {
  command = plan

  variables {
    name            = "cache"
    request_metrics = false
    dashboard       = false
    force_destroy   = false
  }

  assert {
    condition = length(concat(
      aws_s3_bucket_metric.this,
      aws_cloudwatch_metric_alarm.errors,
      aws_cloudwatch_metric_alarm.latency,
      aws_cloudwatch_metric_alarm.size,
      aws_cloudwatch_dashboard.this,
      aws_vpc_endpoint.this,
      values(aws_iam_role.eks),
    )) == 0
    error_message = "what is not asked for must not be made"
  }

  assert {
    condition     = aws_s3_bucket.this[0].force_destroy == false
    error_message = "force_destroy must be the caller's to turn off"
  }

  assert {
    condition     = jsondecode(aws_iam_policy.access["writer"].policy).Statement[1].Resource == "arn:aws:s3:::cache/s3kv/*"
    error_message = "the default prefix must be that of s3kv"
  }
}
